// ZeRO stage 1 (1910.02054, section 5.1) around any torch::optim::Optimizer.
//
//   auto group = zero::init();
//   zero::ZeroRedundancyOptimizer optimizer(group, model->parameters(), [](const auto& groups) {
//     return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(3e-4));
//   });
//   loss.backward();
//   optimizer.step();  // averages the gradients, updates this rank's parameters, sends them to all
//
// The weights are those of the unsharded optimizer fed with the mean gradients, bit for bit; each
// rank holds about 1/N of the optimizer's state. Parameters and gradients stay whole on every rank:
// zero::Engine shards those too.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/comm/group.h"

namespace zero {

struct ZeroRedundancyOptions {
  /// step() averages the gradients over the ranks. Set it to false if you have reduced them
  /// yourself: each owner then takes its own gradients as they are.
  bool average_gradients = true;
  /// The constructor sends rank 0's parameters to all. Set it to false if you have made them equal
  /// yourself.
  bool broadcast_parameters = true;
  /// Gradients and parameters travel in buffers of this size, which stay allocated.
  int64_t bucket_bytes = int64_t{32} << 20;
};

/// Deals whole parameters to ranks, the largest first, each to the rank that has the fewest bytes
/// so far (then the lowest). An inner optimizer, made by the factory, updates the parameters that
/// this rank owns.
///
/// It is a torch::optim::Optimizer: param_groups() holds all parameters and the options, and a
/// change of the options there (by a learning-rate scheduler, say) holds from the next step.
/// state() is empty; inner().state() is this rank's. After step(), `.grad` of an owned parameter is
/// the mean; others keep this rank's own gradient.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer {
 public:
  using ParameterGroups = std::vector<torch::optim::OptimizerParamGroup>;
  /// Makes the inner optimizer over the given groups: all groups in the user's order, some perhaps
  /// without parameters.
  using Factory =
      std::function<std::unique_ptr<torch::optim::Optimizer>(const ParameterGroups& groups)>;

  /// Collective. Throws ConfigError if the ranks' parameters differ in number, shape, strides or
  /// dtype, where a parameter's layout or dtype cannot be sharded, and for LBFGS, whose update
  /// needs all parameters at once.
  ZeroRedundancyOptimizer(std::shared_ptr<comm::Group> group, const ParameterGroups& groups,
                          Factory factory, ZeroRedundancyOptions options = {});
  ZeroRedundancyOptimizer(std::shared_ptr<comm::Group> group, std::vector<at::Tensor> parameters,
                          Factory factory, ZeroRedundancyOptions options = {});
  ~ZeroRedundancyOptimizer() override;

  /// Collective. Returns what `closure` (the loss, computed with gradients on) returned. A gradient
  /// that is missing on some ranks counts as zeros there; a parameter without a gradient on all
  /// ranks is skipped. Throws ConfigError on every rank for a sparse gradient.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collective. Use it in place of torch::optim::Optimizer's, which would not deal the parameters;
  /// if that is called through a reference to the base, the next step throws.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Collective. Rank 0's archive gets the state of all parameters in the form of the unsharded
  /// optimizer, so it loads there and at any number of ranks. The other ranks' archives get a mark.
  /// Only rank 0 needs memory for the whole state.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Loads an archive that rank 0, or the unsharded optimizer, has saved; keeps the state of this
  /// rank's parameters. Each rank reads the same archive. Throws CheckpointError for another rank's
  /// archive or one that does not fit.
  void load(torch::serialize::InputArchive& archive) override;

  /// Returns the optimizer of the parameters that this rank owns.
  torch::optim::Optimizer& inner();
  /// Returns the rank that owns parameter `index` of param_groups()[group].
  int owner(size_t group, size_t index) const;

 private:
  struct Impl;
  explicit ZeroRedundancyOptimizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero
