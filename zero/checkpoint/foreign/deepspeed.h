// The parts of DeepSpeed's folders. The readers of its forms use them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/foreign/pt_file.h"
#include "zero/checkpoint/foreign/readers.h"

namespace zero::foreign {

/// The model file of rank 0. Its names, shapes and ties are needed to read the optimizers' files.
class DeepspeedModel {
 public:
  using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

  /// `file` must outlive this object.
  explicit DeepspeedModel(const PtFile& file);

  const PtFile& file() const { return *file_; }
  /// Returns names and shapes of the trained parameters of each group, in the order in which they
  /// lie in the group. At stage 3 the groups are sub-groups.
  const std::vector<Shapes>& groups() const { return groups_; }
  /// Return the tensors of the module, whether a name is that of a buffer, and whether it is tied
  /// to another.
  const std::vector<std::pair<std::string, StoredTensor>>& module() const { return module_; }
  bool is_buffer(const std::string& name) const { return buffers_.contains(name); }
  bool is_tied(const std::string& name) const { return ties_.contains(name); }

  /// Sets the steps and buffers of the view, and the texts that the program has attached.
  void describe(CheckpointView& view) const;
  /// Adds the parameters that the view does not have yet (frozen ones), and the names of tied
  /// parameters. With `sharded`, as stage 3 saves, the frozen parameters lie in parts in the model
  /// files of all ranks.
  void add_rest(CheckpointView& view, const std::vector<PtFile>& models, bool sharded) const;

 private:
  void read_shapes(const Value& root);

  const PtFile* file_;
  std::vector<std::pair<std::string, StoredTensor>> module_;
  std::set<std::string> buffers_;
  std::map<std::string, std::string> ties_;  // from another name of a parameter to its first name
  std::vector<Shapes> groups_;
};

/// Adds the parameters of stages 1 to 3, from the optimizer and model files of all ranks.
void view_sharded(const std::vector<std::filesystem::path>& files,
                  const std::vector<PtFile>& models, CheckpointView& view);
/// Adds the trained parameters of stage 0. Its optimizer file has no names, so they are found by
/// the order of shapes.
void view_unsharded(const DeepspeedModel& model, CheckpointView& view);
/// Adds the parameters of a universal checkpoint: `folder` has a folder for each of them.
void view_universal(const std::filesystem::path& folder, const DeepspeedModel& model,
                    CheckpointView& view);

/// Returns the state of a loss scaler, or of a dict with the same keys; nothing if losses are not
/// scaled.
std::optional<LossScaleState> loss_scale_of(const Value& scaler);
/// Returns the hyper-parameters of a param group. Values that JSON has no form for are left out.
nlohmann::json hyper_parameters(const Value& group);
/// Returns a step count, which is stored as a number or as a tensor of one number.
std::optional<int64_t> steps_of(const PtFile& file, const Value* step);

}  // namespace zero::foreign
