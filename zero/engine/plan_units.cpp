#include "zero/engine/plan_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/reduce_kernels.h"
#include "zero/engine/update_timing.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero {

namespace {

Tier tier_of(OffloadDevice device) {
  return device == OffloadDevice::nvme  ? Tier::disk
         : device == OffloadDevice::cpu ? Tier::host
                                        : Tier::device;
}

// Chooses `tier` for all units except the first ones, which hold at most `may_stay` of this rank's
// elements. Every unit is used as often as any other. But backward reduces the gradients of the
// first units last, and the next forward pass needs these units first, so their updates hold the
// step up if they wait for a disk.
class FirstUnitsStay {
 public:
  FirstUnitsStay(int64_t may_stay, Tier tier) : room_(may_stay), tier_(tier) {}
  Tier of_next(int64_t numel) {
    if (numel > room_) return tier_;
    room_ -= numel;
    return Tier::device;
  }

 private:
  int64_t room_;
  Tier tier_;
};

}  // namespace

at::ScalarType dtype_in_engine(const ParameterShape& parameter, const Config& config) {
  const bool narrows = parameter.dtype == at::kFloat && !parameter.stays_fp32;
  return narrows ? config.parameter_dtype() : parameter.dtype;
}

partition::RankGrid grid_of(const Config& config, int64_t hosts, int64_t ranks_a_host) {
  return {.hosts = hosts,
          .ranks_a_host = ranks_a_host,
          .shards = config.mics_shard_size > 0 ? config.mics_shard_size : hosts * ranks_a_host};
}

partition::Layout lay_out(const ModelShape& model, const Config& config,
                          const partition::RankGrid& grid) {
  std::vector<partition::Parameter> described;
  for (const auto& parameter : model.parameters) {
    const auto dtype = dtype_in_engine(parameter, config);
    if (dtype == at::kHalf && parameter.trainable && !config.fp16) {
      throw ConfigError(fmt::format(
          "Parameter '{}' has dtype Half, but fp16.enabled is false: without a scaled loss small "
          "gradients in fp16 are zero. Set fp16.enabled (Config::fp16), or convert the module.",
          parameter.name));
    }
    // Parameters of a unit have one dtype and the same optimizer states, and all are trained or
    // none is; their hyper-parameters may differ.
    const auto& optimizer = parameter.optimizer;
    const auto states =
        static_cast<int64_t>(optimizer.index() * 4 + optim::state_names(optimizer).size());
    const int64_t kind =
        (states * 64 + static_cast<int64_t>(dtype)) * 2 + (parameter.trainable ? 1 : 0);
    described.push_back(
        {parameter.name, parameter.numel(), static_cast<int64_t>(c10::elementSize(dtype)), kind});
  }
  return {std::move(described), static_cast<int>(grid.shards), config.unit_bytes,
          static_cast<int>(grid.replicas())};
}

partition::Sharding sharded_states(const Config& config, int64_t ranks) {
  const bool needs_stage = ranks > 1 || config.offload_param.device != OffloadDevice::none ||
                           config.offload_optimizer.device == OffloadDevice::cpu ||
                           config.offload_optimizer.on_disk_with_gradients() ||
                           config.update_in_backward;
  return partition::sharding_of_stage(needs_stage ? config.stage : 0);
}

std::vector<UnitPlan> plan_units(const partition::Layout& layout, const ModelShape& model,
                                 const Config& config, const PlannedRanks& ranks) {
  FormSettings settings{.ranks = ranks, .sharded = sharded_states(config, ranks.grid.shards)};
  const auto& sharded = settings.sharded;
  settings.in_backward = UpdateTiming::of(config, sharded, ranks.grid).in_backward;
  const auto owned = [&](int64_t unit) {
    return partition::owned_range(layout, unit, sharded,
                                  static_cast<int>(ranks.grid.place(ranks.rank).shard));
  };
  int64_t all = 0;
  for (int64_t u = 0; u < layout.unit_count(); ++u) all += owned(u).size();
  const auto& param = config.offload_param;
  const auto& states = config.offload_optimizer;
  FirstUnitsStay parameters_at(param.device == OffloadDevice::nvme ? param.max_in_cpu : 0,
                               tier_of(param.device));
  FirstUnitsStay optimizer_at(
      static_cast<int64_t>(std::floor((1 - states.ratio) * static_cast<double>(all))),
      tier_of(states.device));
  const bool gradients_on_disk =
      states.on_disk_with_gradients() && sharded.gradients && !settings.in_backward;
  std::vector<UnitPlan> plans;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto& first = model.parameter(layout.unit(u).segments.front().parameter);
    UnitPlan plan;
    plan.trainable = first.trainable;
    plan.owned = owned(u);
    plan.parameters_at = parameters_at.of_next(plan.owned.size());
    plan.optimizer_at = optimizer_at.of_next(plan.owned.size());
    plan.own_memory = model.own_memory;
    // Gradients go to the host with the states that they update. They need not go to a disk with
    // them.
    const bool to_host =
        plan.optimizer_at == Tier::host || (plan.optimizer_at == Tier::disk && plan.own_memory);
    plan.gradients_at = gradients_on_disk ? Tier::disk : to_host ? Tier::host : Tier::device;
    static_cast<Form&>(plan) = form_of(config, settings, dtype_in_engine(first, config),
                                       plan.trainable, plan.gradients_at);
    if (plan.trainable && config.communication_dtype &&
        !comm::can_sum(dtype_of(*config.communication_dtype), plan.gradient_dtype)) {
      throw ConfigError(fmt::format(
          "communication_data_type is {}, but gradients of '{}' are {}: one format of 16 bits is "
          "not rounded to the other. Use \"fp32\", or leave it out.",
          c10::toString(dtype_of(*config.communication_dtype)), first.name,
          c10::toString(plan.gradient_dtype)));
    }
    if (plan.trainable) {
      plan.reach = optim::reach(first.optimizer);
      plan.moments = optim::state_names(first.optimizer);
      const auto signs = optim::state_signs(first.optimizer);
      std::copy(signs.begin(), signs.end(), plan.moment_signs.begin());
    }
    if (plan.split && plan.optimizer_at != Tier::disk && plan.optimizer_at != plan.parameters_at) {
      throw ConfigError(
          "bf16.split_master_weights needs each parameter and its optimizer states in the same "
          "place, or the states on disk, since the parameter is half of its master weight. Give "
          "offload_param.device and offload_optimizer.device the same value (with ratio 1 and "
          "max_in_cpu 0), or switch split_master_weights off.");
    }
    plans.push_back(std::move(plan));
  }
  return plans;
}

}  // namespace zero
