// Shows a checkpoint of any program as whole tensors by name.
//
// Note [Views of checkpoints]
// There is one reader for each form of checkpoint: libzero's own, DeepSpeed's folders, PyTorch's
// distributed ones, and plain weights. Each makes a CheckpointView. The reader reads only what
// describes the tensors. A tensor is read when its `read` is called, and put together from the
// places that hold it, so code that goes over a view needs memory for one tensor. Import, export,
// comparison and changes of the number of ranks are written once, over views.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/optim/loss_scale.h"
#include "zero/optim/optimizer.h"

namespace zero::foreign {

struct LazyTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> read;  ///< returns the values on the CPU; throws CheckpointError

  int64_t numel() const;
};

struct CheckpointView {
  struct Parameter {
    std::string name;
    std::vector<std::string> other_names;  ///< the other names of a tied parameter
    std::vector<int64_t> shape;
    std::vector<int64_t> strides{};  ///< in the model that was saved; empty: row-major
    std::string optimizer;  ///< name of its optimizer, as in optim::name; empty: it has no states
    int64_t group = 0;
    int64_t steps = 0;
    /// "parameter" (the weights, in fp32 if the checkpoint has them in fp32), "master" if the
    /// checkpoint has both, and the optimizer's states.
    std::map<std::string, LazyTensor> states;

    /// Returns the weights in the widest dtype that the checkpoint has.
    const LazyTensor& weights() const {
      const auto master = states.find("master");
      return master != states.end() ? master->second : states.at("parameter");
    }
  };

  std::string form;  ///< such as "DeepSpeed, stage 2 of 4 ranks"
  int64_t stage = 0;
  int64_t steps = 0;
  std::optional<LossScaleState> loss_scale;
  std::optional<double> grad_norm{};  ///< as in the manifest
  std::vector<std::string> groups;    ///< as in the manifest
  std::vector<Parameter> parameters;
  /// Buffers and attached texts may be each rank's own.
  struct OfRank {
    std::map<std::string, LazyTensor> buffers;
    std::map<std::string, std::string> attached;
  };
  std::map<std::string, LazyTensor> buffers;  ///< of rank 0, and so are the texts
  std::map<std::string, std::string> attached;
  std::vector<OfRank> other_ranks{};  ///< from rank 1; empty: all have what rank 0 has

  /// Return what rank `rank` takes, as Manifest::file_of does: its own, or that of an earlier rank
  /// where fewer ranks have saved.
  const std::map<std::string, std::string>& attached_of(int rank) const;
  const std::map<std::string, LazyTensor>& buffers_of(int rank) const;
  std::vector<std::string> left_out;  ///< parts that the view has no place for, and why
  std::vector<std::string> missing;   ///< missing parts that a run needs to go on as before

  /// Returns the weights of a parameter for use, where its optimizer trains others
  /// (optim::evaluated): computed from those of training, in their dtype. `widest` asks for the
  /// widest dtype that the checkpoint has, else it is that of the parameters.
  LazyTensor for_use(const Parameter& parameter, bool widest) const;
  /// Adds the group with this optimizer, and returns its number.
  int64_t add_group(const Optimizer& optimizer);
};

/// Reads a checkpoint of any known form, after it has compared sizes and checksums. Throws
/// CheckpointError, which names the checkpoint, if it is damaged, not complete or of no known form.
/// With `weights_only` the view has no states, so training begins with new ones.
CheckpointView view_checkpoint(const std::filesystem::path& path, bool weights_only = false);

/// Writes a view as a checkpoint in libzero's format, with the slices of `ranks` ranks. It takes
/// the place of an earlier checkpoint when it is complete.
void write_checkpoint(const CheckpointView& view, const std::filesystem::path& to, int ranks = 1);

/// Returns the differences between two views, a sentence for each: names, shapes, steps,
/// hyper-parameters, the loss scale, and elements of tensors that differ by more than `tolerance`
/// (0: in any bit). Weights are compared in the widest dtype that each view has.
std::vector<std::string> differences(const CheckpointView& a, const CheckpointView& b,
                                     double tolerance);

}  // namespace zero::foreign
