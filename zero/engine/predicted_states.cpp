#include "zero/engine/predicted_states.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "zero/engine/form.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero {

int shard_ranks(const Config& config, int ranks) {
  if (config.mics_shard_size < 1) return ranks;
  return static_cast<int>(std::min<int64_t>(config.mics_shard_size, ranks));
}

partition::StateMemory predicted_states(const Config& config, int64_t parameters, int ranks,
                                        Bound bound, int64_t frozen) {
  ranks = shard_ranks(config, ranks);
  const auto& optimizer = config.offload_optimizer;
  const int64_t dtype_bytes = config.parameter_bytes();
  // A model for Muon or Apollo has parameters that are no hidden matrices, with AdamW's states. A
  // model for Adafactor has parameters with a second moment of each element.
  const auto chosen = config.optimizer.value_or(Optimizer(AdamW{}));
  const bool most = bound == Bound::most;
  const auto arrays = most && optim::beside_matrices(chosen) ? optim::kMostStates
                      : most ? optim::state_names(optim::suited(chosen, 1)).size()
                             : optim::state_names(chosen).size();
  const auto form = form_of(config, {}, config.parameter_dtype(), true, Tier::device);
  const auto bytes_of = [](at::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  };
  const bool is_master = form.dtype == at::kFloat || form.narrow;
  const int64_t master_bytes = is_master ? 0 : bytes_of(form.master_dtype());
  // Every format has whole bytes for this many elements.
  const auto moment_bytes =
      static_cast<int64_t>(arrays) * optim::state_bytes(form.moment_format, partition::kAlignment);
  auto states =
      partition::state_memory(partition::sharding_of_stage(ranks == 1 ? 0 : config.stage),
                              static_cast<double>(parameters), ranks,
                              {.parameter = dtype_bytes,
                               .gradient = bytes_of(form.gradient_dtype),
                               .optimizer = master_bytes + moment_bytes / partition::kAlignment,
                               .scales = moment_bytes % partition::kAlignment});
  const double trained =
      parameters > 0 ? 1 - static_cast<double>(frozen) / static_cast<double>(parameters) : 1;
  states.gradients *= trained;
  states.optimizer *= trained;
  if (config.hpz_partition_size > 1 && ranks > config.hpz_partition_size) {
    // Each host keeps all parameters, in equal shares; quantised ones beside the slices.
    states.parameters = (config.quantised.weights ? states.parameters : 0) +
                        static_cast<double>(parameters * dtype_bytes) /
                            static_cast<double>(config.hpz_partition_size);
  }
  if (config.offload_param.device == OffloadDevice::nvme) states.parameters = 0;
  if ((optimizer.on_disk_with_gradients() || config.update_in_backward) && config.stage >= 2)
    states.gradients = 0;
  if (optimizer.device == OffloadDevice::nvme) states.optimizer *= 1 - optimizer.ratio;
  return states;
}

partition::StateMemory predicted_states(const Config& config, const StepSize& size) {
  auto states = predicted_states(config, size.parameters, size.ranks, Bound::most, size.frozen);
  const bool factored =
      config.optimizer && !optim::factored_states(*config.optimizer, {1, 1}, {1, 1}).empty();
  if (!factored || size.matrix_elements == 0) return states;
  // The ranks that project matrices share their states; other factored states are on every rank.
  const bool shared = config.stage > 0 && optim::reach(*config.optimizer) == optim::Reach::matrix;
  const double bytes_of_factored =
      4 * static_cast<double>(size.factored_numel) / (shared ? size.ranks : 1);
  // The states lie between those without second moments of elements and those with all of them.
  const double none =
      predicted_states(config, size.parameters, size.ranks, Bound::least, size.frozen).optimizer;
  const double share =
      1 - static_cast<double>(size.matrix_elements) / static_cast<double>(size.parameters);
  states.optimizer = none + (states.optimizer - none) * share + bytes_of_factored;
  return states;
}

partition::StateMemory predicted_device_states(const Config& config, const StepSize& size) {
  auto states = predicted_states(config, size);
  if (config.offload_param.device == OffloadDevice::cpu) states.parameters = 0;
  if (config.offload_optimizer.device == OffloadDevice::cpu) {
    const double stays = 1 - config.offload_optimizer.ratio;
    states.optimizer *= stays;
    if (config.stage >= 2) states.gradients *= stays;
  }
  return states;
}

StepSize step_size(const ModelShape& model, int ranks, int64_t element_bytes) {
  StepSize size{.ranks = ranks};
  for (const auto& parameter : model.parameters) {
    const bool packed = parameter.dtype == at::kByte;
    const auto numel = packed ? at::ceil_div(parameter.numel(), element_bytes) : parameter.numel();
    size.parameters += numel;
    size.largest_parameter = std::max(size.largest_parameter, numel);
    if (const int64_t factored = factored_numel(parameter); factored > 0) {
      size.matrix_elements += numel;
      size.factored_numel += factored;
    }
  }
  return size;
}

}  // namespace zero
