// A checkpoint of any program as whole tensors by name.
//
// Note [Views of checkpoints]
// One reader for each form makes a CheckpointView: libzero's own, DeepSpeed's folders, PyTorch's
// distributed ones, plain weights. It reads what describes the tensors. A tensor is read when its
// `read` is called, put together from the places that hold it, so whoever goes over a view needs
// memory for one tensor. Everything that is made of a checkpoint (import, export, comparison, other
// numbers of ranks) is written once, over views.
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
  std::function<at::Tensor()> read;  ///< returns the values on the CPU: CheckpointError

  int64_t numel() const;
};

struct CheckpointView {
  struct Parameter {
    std::string name;
    std::vector<std::string> other_names;  ///< of one that is tied
    std::vector<int64_t> shape;
    std::string optimizer;  ///< its kind, as optim::name has it; empty: it has no states
    int64_t group = 0;
    int64_t steps = 0;
    /// "parameter" (the weights, in fp32 where the checkpoint has them so), "master" where both are
    /// there, and the optimizer's states.
    std::map<std::string, LazyTensor> states;

    /// Returns the weights in the most bits that are there.
    const LazyTensor& weights() const {
      const auto master = states.find("master");
      return master != states.end() ? master->second : states.at("parameter");
    }
  };

  std::string form;  ///< "DeepSpeed, stage 2 of 4 ranks"
  int64_t stage = 0;
  int64_t steps = 0;
  std::optional<LossScaleState> loss_scale;
  std::vector<std::string> groups;  ///< as the manifest has them
  std::vector<Parameter> parameters;
  std::map<std::string, LazyTensor> buffers;
  std::map<std::string, std::string> attached;
  std::vector<std::string> left_out;  ///< what it holds that the view has no place for, and why
  std::vector<std::string> missing;   ///< what a run needs to go on as before, and it does not hold

  /// Adds the group with this optimizer, and returns its number.
  int64_t add_group(const Optimizer& optimizer);
};

/// Reads what a checkpoint of any known form holds; its sizes and checksums are compared first.
/// Throws CheckpointError for one that is damaged, not complete or of no known form, and names it.
/// With `weights_only` the view has no states: training begins with new ones.
CheckpointView view_checkpoint(const std::filesystem::path& path, bool weights_only = false);

/// Writes a view as a checkpoint in libzero's format, with the slices of so many ranks, which takes
/// the place of an earlier one when it is complete.
void write_checkpoint(const CheckpointView& view, const std::filesystem::path& to, int ranks = 1);

/// Returns what differs between two views, a sentence for each: names, shapes, steps,
/// hyper-parameters, the loss scale, and elements of tensors by more than `tolerance` (0: in any
/// bit). Weights are compared in the most bits that each has.
std::vector<std::string> differences(const CheckpointView& a, const CheckpointView& b,
                                     double tolerance);

}  // namespace zero::foreign
