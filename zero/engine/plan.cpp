#include "zero/engine/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/reduce_kernels.h"
#include "zero/device/stream.h"
#include "zero/engine/factored_states.h"
#include "zero/optim/optimizer.h"

namespace zero {

namespace {

Tier tier_of(OffloadDevice device) {
  return device == OffloadDevice::nvme  ? Tier::disk
         : device == OffloadDevice::cpu ? Tier::host
                                        : Tier::device;
}

// Chooses `tier` for all units but the first ones that hold no more than `may_stay` of this rank's
// elements. Every unit is used as often as any other; but backward reduces the gradients of the
// first ones last, and the next forward pass needs them first, so there an update that waits for a
// disk is waited for.
class Beyond {
 public:
  Beyond(int64_t may_stay, Tier tier) : left_(may_stay), tier_(tier) {}
  Tier of_next(int64_t numel) {
    if (numel > left_) return tier_;
    left_ -= numel;
    return Tier::device;
  }

 private:
  int64_t left_;
  Tier tier_;
};

}  // namespace

at::ScalarType dtype_in_engine(const Model& model, int64_t parameter, const Config& config) {
  const auto dtype = model.parameter(parameter).scalar_type();
  const bool narrows = dtype == at::kFloat && !model.stays_fp32(parameter);
  return narrows ? config.parameter_dtype() : dtype;
}

partition::Layout lay_out(const Model& model, const Config& config, const Placement& placement) {
  std::vector<partition::Parameter> described;
  for (int64_t p = 0; p < model.size(); ++p) {
    const auto& parameter = model.parameter(p);
    const auto dtype = dtype_in_engine(model, p, config);
    if (dtype == at::kHalf && model.trainable(p) && !config.fp16) {
      throw ConfigError(fmt::format(
          "Parameter '{}' has dtype Half, but fp16.enabled is false: without a scaled loss small "
          "gradients in fp16 are zero. Set fp16.enabled (Config::fp16), or convert the module.",
          model.name(p)));
    }
    // Of one dtype, trainable or not, and with the same optimizer states; hyper-parameters may
    // differ within a unit.
    const auto& optimizer = model.optimizer_of(p);
    const auto states =
        static_cast<int64_t>(optimizer.index() * 4 + optim::state_names(optimizer).size());
    const int64_t kind =
        (states * 64 + static_cast<int64_t>(dtype)) * 2 + (model.trainable(p) ? 1 : 0);
    described.push_back(
        {model.name(p), parameter.numel(), static_cast<int64_t>(c10::elementSize(dtype)), kind});
  }
  return {std::move(described), placement.shards->size(), config.unit_bytes,
          placement.replicas->size()};
}

partition::Placement sharded_states(const Config& config, int ranks) {
  const bool pages = ranks > 1 || config.offload_param.device != OffloadDevice::none ||
                     config.offload_optimizer.device == OffloadDevice::cpu ||
                     config.offload_optimizer.on_disk_with_gradients() || config.update_in_backward;
  return partition::placement_of_stage(pages ? config.stage : 0);
}

std::vector<UnitPlan> plan_units(const partition::Layout& layout, const Model& model,
                                 const Config& config, const Placement& placement,
                                 const UpdateTiming& timing) {
  const auto owned = [&](int64_t unit) {
    return partition::owned_range(layout, unit, placement.sharded, placement.shards->rank());
  };
  int64_t all = 0;
  for (int64_t u = 0; u < layout.unit_count(); ++u) all += owned(u).size();
  const auto& param = config.offload_param;
  const auto& states = config.offload_optimizer;
  Beyond parameters_at(param.device == OffloadDevice::nvme ? param.max_in_cpu : 0,
                       tier_of(param.device));
  Beyond states_at(static_cast<int64_t>(std::floor((1 - states.ratio) * static_cast<double>(all))),
                   tier_of(states.device));
  const bool gradients_on_disk =
      states.on_disk_with_gradients() && placement.sharded.gradients && !timing.in_backward;
  const auto widens = [](const comm::Group& group) {
    return group.sent_dtype(at::kBFloat16, at::kFloat) == at::kFloat;
  };
  const FormSettings settings{.sharded = placement.sharded,
                              .grid = placement.grid(),
                              .in_backward = timing.in_backward,
                              .widens_in_block = widens(*placement.shards),
                              .widens_to_replicas = widens(*placement.replicas)};
  std::vector<UnitPlan> plans;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto first = layout.unit(u).segments.front().parameter;
    UnitPlan plan;
    plan.trainable = model.trainable(first);
    plan.owned = owned(u);
    plan.parameters_at = parameters_at.of_next(plan.owned.size());
    plan.states_at = states_at.of_next(plan.owned.size());
    plan.own_memory = is_asynchronous(model.device());
    // To the host they go with what they update; to a disk they need not.
    const bool to_host =
        plan.states_at == Tier::host || (plan.states_at == Tier::disk && plan.own_memory);
    plan.gradients_at = gradients_on_disk ? Tier::disk : to_host ? Tier::host : Tier::device;
    static_cast<Form&>(plan) = form_of(config, settings, dtype_in_engine(model, first, config),
                                       plan.trainable, plan.gradients_at);
    if (plan.trainable && config.communication_dtype &&
        !comm::can_sum(dtype_of(*config.communication_dtype), plan.gradient_dtype)) {
      throw ConfigError(fmt::format(
          "communication_data_type is {}, but gradients of '{}' are {}: one format of 16 bits is "
          "not rounded to the other. Use \"fp32\", or leave it out.",
          c10::toString(dtype_of(*config.communication_dtype)), model.name(first),
          c10::toString(plan.gradient_dtype)));
    }
    if (plan.trainable) {
      plan.moments = optim::state_names(model.optimizer_of(first));
      const auto signs = optim::state_signs(model.optimizer_of(first));
      std::copy(signs.begin(), signs.end(), plan.moment_signs.begin());
    }
    for (const auto& segment : layout.unit(u).segments) {
      if (const auto factors = factors_of(model, segment.parameter))
        plan.factored_bytes += 4 * (factors->rows() + factors->columns());
    }
    if (plan.split && plan.states_at != Tier::disk && plan.states_at != plan.parameters_at) {
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

StepSize step_size(const Model& model, int ranks) {
  StepSize size{.ranks = ranks};
  for (int64_t p = 0; p < model.size(); ++p) {
    const auto numel = model.parameter(p).numel();
    size.parameters += numel;
    size.largest_parameter = std::max(size.largest_parameter, numel);
    if (const auto factors = factors_of(model, p)) {
      size.matrix_elements += numel;
      size.matrix_sides += factors->rows() + factors->columns();
    }
  }
  return size;
}

}  // namespace zero
