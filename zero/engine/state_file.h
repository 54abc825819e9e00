// Names in the files of saved states, their headers, and the checks of one against a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/checkpoint/safetensors.h"
#include "zero/config/config.h"
#include "zero/engine/factored_states.h"
#include "zero/engine/model.h"
#include "zero/engine/state_table.h"
#include "zero/optim/loss_scale.h"
#include "zero/partition/layout.h"

namespace zero {

/// The format of files of whole tensors, as their headers have it.
inline constexpr const char* kFullStates = "libzero full states 1";

/// The parts of an engine that hold states. They outlive whatever is made from this.
struct StateParts {
  const partition::Layout& layout;
  StateTable& table;
  Model& model;
  FactoredStates& factored;
  const Config& config;
};

/// How far a run had come when it was saved.
struct Progress {
  int64_t steps = 0;
  std::vector<int64_t> parameter_steps;  ///< updates that each parameter has had
  std::optional<LossScale> loss_scale;   ///< where the configuration scales losses
  std::optional<double> grad_norm;       ///< StepProgress::last_norm
  int64_t of(int64_t parameter) const {
    const auto p = static_cast<size_t>(parameter);
    return p < parameter_steps.size() ? parameter_steps[p] : 0;
  }
};

/// Returns the loss scale of a run that goes on with `state`, read from `path`; a new one if there
/// is no `state`.
std::optional<LossScale> continued_scale(const Config& config,
                                         const std::optional<LossScaleState>& state,
                                         const std::string& path);

/// Returns how an engine's states lie on its ranks, and its parameters, as headers have them.
std::map<std::string, std::string> description(const StateParts& parts);
/// Returns the header of a file of whole tensors.
std::map<std::string, std::string> header(const StateParts& parts, const Progress& progress);

/// Returns the name of a rank's file in a folder of shards.
std::string shard_name(int rank, int ranks);
/// Returns the key of a slice in a rank's file: "exp_avg.h.0.ln_1.weight".
std::string slice_key(std::string_view state, std::string_view parameter);
/// Returns the kind of optimizer that updates a parameter; nothing if it is frozen.
std::string kind_of(const StateParts& parts, int64_t parameter);
/// Returns the format of a state in a checkpoint: Manifest::State.
std::string format_of(const UnitPlan& plan, State state);

/// Returns the key of an optimizer's state of a parameter in files of whole tensors.
std::string state_key(std::string_view state, std::string_view parameter);
/// Returns the key of a buffer.
std::string buffer_key(std::string_view buffer);
/// Returns the states of a unit that a checkpoint has. A low-precision parameter is
/// saved beside its master, since the user may have written it since the last update. fp32 master
/// weights are the parameters, wherever they lie.
std::vector<State> cell_states(const UnitPlan& plan);
/// Returns the entry for such a tensor in the header of a file.
TensorInfo info_of(const std::string& key, const at::Tensor& tensor);
/// Returns the entries of all factored states in the header of a file of whole tensors.
std::vector<TensorInfo> factored_infos(const StateParts& parts);

/// A safetensors file, and its checks against a model. Each throws CheckpointError, naming the file
/// and both sides.
class StateFile {
 public:
  explicit StateFile(const std::filesystem::path& path) : reader_(path) {}
  const SafetensorsReader& reader() const { return reader_; }
  /// Returns a value of the header.
  const std::string& metadata(const std::string& key) const;
  void expect(const std::string& key, const std::string& wanted) const;
  void expect_tensor(const TensorInfo& wanted) const;
  /// Expects a tensor of `like`'s shape and dtype. If `like` is floating-point, any floating-point
  /// dtype will do.
  void expect_values(const std::string& name, const at::Tensor& like) const;
  /// Expects the sizes and strides of the model's parameters, which tell the order of their flat
  /// arrays. Files of earlier versions do not have them.
  void expect_shapes(const Model& model) const;
  /// Returns the progress; with a new loss scale if the file has none.
  Progress progress(const StateParts& parts) const;

 private:
  std::optional<LossScaleState> loss_scale() const;
  std::string path() const { return reader_.path().string(); }
  SafetensorsReader reader_;
};

}  // namespace zero
