#include "zero/engine/tiers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "zero/base/error.h"
#include "zero/comm/shm_collectives.h"
#include "zero/store/disk_tier.h"

namespace zero {

namespace {

std::string bytes(double count) { return format_bytes(std::max(0.0, count)); }

// Returns the bytes that a step needs beside the states: the largest parameter gathered, its
// gradient and its slice, two buckets, staging, and the buffers of streams and reads from a disk.
double work_of_step(const Config& config, const StepSize& size) {
  const double largest =
      static_cast<double>(size.largest_parameter) * static_cast<double>(config.parameter_bytes());
  const double buckets = 2 * static_cast<double>(config.unit_bytes);
  const double stream =
      static_cast<double>(config.offload_optimizer.buffer_count * store::DiskTier::kBlockNumel) *
          16 +
      static_cast<double>(config.offload_param.buffer_count) *
          static_cast<double>(config.unit_bytes) / size.ranks;
  return largest * (2 + 1.0 / size.ranks) + buckets + comm::kStagingBytes + stream +
         static_cast<double>(size.activations);
}

// Returns the bytes of the second copy of the parameters that a rank updates while others read the
// first. Parameters on disk need none in memory.
double hidden_parameters(const Config& config, const StepSize& size) {
  if (!config.update_in_backward && config.offload_optimizer.delayed_update_after == 0) return 0;
  const bool sharded = partition::sharding_of_stage(size.ranks == 1 ? 0 : config.stage).optimizer;
  return static_cast<double>(size.parameters) * static_cast<double>(config.parameter_bytes()) /
         (sharded ? size.ranks : 1);
}

// Parameters on disk are in memory while they are gathered. They get half of the memory that the
// host has left beside a step, since nobody knows the needs of updates under way and of other
// programs.
TierChoice bound_gathered(Config config, const StepSize& size) {
  const auto element_bytes = static_cast<double>(config.parameter_bytes());
  const double rest = predicted_states(config, size).total() + work_of_step(config, size);
  const auto available = static_cast<double>(size.available);
  const double fit = std::max(0.0, available - rest) / 2 / element_bytes;
  const auto wanted = static_cast<double>(std::min(config.max_live_parameters, size.parameters));
  if (wanted <= fit) return {std::move(config), {}};
  config.max_live_parameters = static_cast<int64_t>(fit);
  auto reason = fmt::format(
      "{:.0f} million parameters may be gathered at once, which takes {}; of the {} that the host "
      "has left for a rank a step needs about {}: not more than {:.0f} million stay gathered "
      "(stage3_max_live_parameters, --live-parameters)",
      wanted / 1e6, bytes(wanted * element_bytes), bytes(available), bytes(rest), fit / 1e6);
  return {std::move(config), std::move(reason)};
}

}  // namespace

std::vector<CheaperChoice> cheaper_choices(const Config& config, const StepSize& size) {
  // A step holds full units of gradients from stage 2 on, two at a time, and at stage 3 of
  // parameters too.
  const auto dtype_bytes = static_cast<double>(config.parameter_bytes());
  const double unit = std::max(static_cast<double>(size.largest_parameter) * dtype_bytes,
                               std::min(static_cast<double>(config.unit_bytes),
                                        static_cast<double>(size.parameters) * dtype_bytes));
  const auto need = [&](const Config& as) {
    return predicted_device_states(as, size).total() + unit * (as.stage == 3   ? 4
                                                               : as.stage == 2 ? 2
                                                                               : 0);
  };
  std::vector<CheaperChoice> choices;
  auto next = config;
  std::string optimizer_part;
  std::string param_part;
  // Takes `as` as a choice if it frees more than the choices before it.
  const auto consider = [&](const Config& as) {
    const auto frees = static_cast<int64_t>(need(config) - need(as));
    if (frees <= (choices.empty() ? 0 : choices.back().bytes)) return;
    std::string what = as.stage != config.stage ? fmt::format("stage {}", as.stage) : "";
    for (const auto& part : {optimizer_part, param_part}) {
      if (!part.empty()) what += (what.empty() ? "" : ", ") + part;
    }
    choices.push_back({std::move(what), frees});
    next = as;
  };
  const auto consider_stage = [&](int stage) {
    if (next.stage >= stage) return;
    auto as = next;
    as.stage = stage;
    consider(as);
  };
  if (size.ranks > 1) {
    consider_stage(1);
    consider_stage(2);
  }
  if (const auto& now = config.offload_optimizer;
      now.device == OffloadDevice::none || now.ratio < 1) {
    auto as = next;
    as.offload_optimizer.ratio = 1;
    optimizer_part = "offload_optimizer.ratio 1";
    if (now.device == OffloadDevice::none) {
      as.offload_optimizer.device = OffloadDevice::cpu;
      optimizer_part = "offload_optimizer.device \"cpu\" (--offload-optimizer cpu)";
    }
    consider(as);
  }
  consider_stage(2);  // also alone: the gradients leave as they are ready
  if (size.ranks > 1) consider_stage(3);
  if (config.offload_param.device == OffloadDevice::none) {
    auto as = next;
    as.stage = 3;
    as.offload_param.device = OffloadDevice::cpu;
    param_part = "offload_param.device \"cpu\" (--offload-param cpu)";
    consider(as);
  }
  return choices;
}

TierChoice choose_tiers(Config config, const StepSize& size) {
  if (config.offload_param.device == OffloadDevice::nvme && config.memory_budget == 0)
    return bound_gathered(std::move(config), size);
  auto& optimizer = config.offload_optimizer;
  auto& parameters = config.offload_param;
  const bool chosen =
      parameters.device != OffloadDevice::none || optimizer.device != OffloadDevice::none;
  if (config.memory_budget == 0 || chosen || optimizer.nvme_path.empty())
    return {std::move(config), {}};

  const auto states = predicted_states(config, size);
  const double hidden = hidden_parameters(config, size);
  const double work = work_of_step(config, size);
  const double room = static_cast<double>(config.memory_budget) - work;
  auto reason = fmt::format(
      "of the budget of {} a step's own work needs about {}; states take {} (parameters {}, "
      "gradients {}, optimizer {}){}",
      bytes(static_cast<double>(config.memory_budget)), bytes(work), bytes(states.total()),
      bytes(states.parameters), bytes(states.gradients), bytes(states.optimizer),
      hidden > 0 ? fmt::format(", and {} what updates beside a pass hide in memory", bytes(hidden))
                 : "");
  if (states.total() + hidden <= room) return {std::move(config), reason + ": all stay in memory"};

  optimizer.device = OffloadDevice::nvme;
  double others = states.parameters + hidden + states.gradients;  // the states that stay in memory
  if (others > room && config.stage >= 2 && states.gradients > 0) {
    optimizer.gradients = true;
    others -= states.gradients;
  }
  // With hpZ a host keeps all parameters in memory.
  const bool kept_on_hosts =
      config.hpz_partition_size > 1 && size.ranks > config.hpz_partition_size;
  if (others > room && config.stage == 3 && !kept_on_hosts) {
    parameters.device = OffloadDevice::nvme;
    parameters.nvme_path = optimizer.nvme_path;
    others = 0;
  }
  // The room that is left keeps a part of the optimizer's states in memory. Each byte of them saves
  // the disk two bytes a step, one read and one written. The part is in twentieths, so that it
  // reads well.
  const double excess = states.optimizer > 0 ? 1 - (room - others) / states.optimizer : 1;
  optimizer.ratio = std::clamp(std::ceil(excess * 20) / 20, 0.05, 1.0);

  const bool all_parameters = parameters.device == OffloadDevice::nvme;
  reason += optimizer.ratio < 1
                ? fmt::format(": {:.0f} % of the optimizer's", 100 * optimizer.ratio)
                : std::string(": the optimizer's");
  if (optimizer.gradients) reason += all_parameters ? ", the gradients" : " and the gradients";
  if (all_parameters) reason += " and the parameters";
  reason += " go to disk";
  if (others > room) {
    reason += fmt::format(", and {} the parameters would",
                          kept_on_hosts ? "without zero_hpz_partition_size" : "at stage 3");
  }
  return {std::move(config), std::move(reason)};
}

void check_budget(const Config& config, int64_t parameters, int ranks, int64_t frozen) {
  const auto& optimizer = config.offload_optimizer;
  if (optimizer.device == OffloadDevice::nvme && optimizer.ratio < 1) return;
  check_budget(config, ranks, predicted_states(config, parameters, ranks, Bound::least, frozen),
               [&](int stage) {
                 auto as = config;
                 as.stage = stage;
                 return predicted_states(as, parameters, ranks, Bound::least, frozen).total();
               });
}

void check_budget(const Config& config, int ranks, const partition::StateMemory& states,
                  const std::function<double(int stage)>& total_at) {
  const auto budget = static_cast<double>(config.memory_budget);
  if (budget == 0 || states.total() <= budget) return;
  std::string others;
  for (int stage = config.stage + 1; ranks > 1 && stage <= 3; ++stage) {
    others += fmt::format("{} {} at stage {}", others.empty() ? "; they take" : ",",
                          bytes(total_at(stage)), stage);
  }
  throw OutOfMemory(fmt::format(
      "The memory budget is {}, but the states of the model alone take {} of each of {} "
      "rank{} at stage {} (parameters {}, gradients {}, optimizer {}){}. Use a higher "
      "stage, more ranks, or a larger budget.",
      bytes(budget), bytes(states.total()), ranks, ranks == 1 ? "" : "s", config.stage,
      bytes(states.parameters), bytes(states.gradients), bytes(states.optimizer), others));
}

}  // namespace zero
