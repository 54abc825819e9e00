#include "zero/engine/engine_plan.h"

#include <fmt/format.h>

#include <string_view>

#include "zero/base/error.h"
#include "zero/engine/fits.h"
#include "zero/engine/on_device.h"
#include "zero/engine/plan_units.h"
#include "zero/engine/tiers.h"
#include "zero/optim/sweeps.h"

namespace zero {

namespace {

Config validated(Config config) {
  config.validate();
  return config;
}

Config with_tiers(Config config, const Model& model, int ranks, int64_t available) {
  // A device gathers units in its own memory, not in the host's.
  if (is_asynchronous(model.device())) return config;
  auto size = step_size(model.shape(), ranks, config.parameter_bytes());
  size.available = available;
  return choose_tiers(std::move(config), size).config;
}

}  // namespace

EnginePlan::EnginePlan(NamedTensors tensors, const std::vector<ParameterGroup>& groups,
                       Config config, std::shared_ptr<comm::Group> ranks)
    : config_(validated(std::move(config))),
      model_(std::move(tensors), groups),
      placement_((model_.keep_fp32(config_.fp32_modules), model_.agree(config_, *ranks),
                  place(config_, group_on_device(ranks, model_)))),
      layout_(lay_out(model_.shape(), config_, placement_.planned().grid)),
      available_(memory_of_rank(group())) {
  const int shards = placement_.shards->size();
  config_ = with_tiers(std::move(config_), model_, shards, available_);
  placement_.sharded = sharded_states(config_, shards);
  timing_ = UpdateTiming::of(config_, placement_.sharded, placement_.planned().grid);
  units_ = plan_units(layout_, model_.shape(), config_, placement_.planned());
  check_passes();
  check_on_device(config_, timing_, model_, *placement_.shards);
}

// Checks the configuration for an optimizer that evaluates other weights than it trains.
void EnginePlan::check_evaluated(const Optimizer& optimizer) const {
  const auto refuse = [&](bool asked, std::string_view what, std::string_view why) {
    if (!asked) return;
    throw ConfigError(fmt::format("{}, and an optimizer is {}, {} Leave the key out, or use AdamW.",
                                  what, optim::name(optimizer), why));
  };
  refuse(config_.bf16_master_weights_and_grads, "bf16.bf16_master_weights_and_grads is true",
         "whose mean takes in ever smaller shares of its iterates, which bf16 would lose.");
  refuse(config_.optimizer_states != optim::StateFormat::fp32 || config_.bf16_optimizer_states,
         "data_types.optimizer_state_dtype is not \"fp32\"", "whose state z is a model's weights.");
  refuse(timing_.delayed_after.has_value(), "offload_optimizer.delayed_update_after is set",
         "whose weights for evaluation would belong to another step than those of training.");
}

void EnginePlan::check_passes() const {
  const auto refuse = [](const Optimizer& optimizer, std::string_view what, std::string_view why) {
    throw ConfigError(fmt::format(
        "{}, and an optimizer is {}, whose update takes two sweeps: {} Leave the key out, "
        "or use an optimizer that updates elements by themselves (AdamW).",
        what, optim::name(optimizer), why));
  };
  for (const auto& optimizer : model_.optimizers()) {
    if (optim::evaluated(optimizer)) check_evaluated(optimizer);
    if (optim::reach(optimizer) == optim::Reach::element) continue;
    if (config_.bf16_master_weights_and_grads)
      refuse(optimizer, "bf16.bf16_master_weights_and_grads is true",
             "its directions are kept for fp32 weights.");
    if (config_.optimizer_states != optim::StateFormat::fp32)
      refuse(optimizer, "data_types.optimizer_state_dtype is not \"fp32\"",
             "the second would read states that the first has rounded.");
    if (timing_.keeps_old_states)
      refuse(optimizer, "update_in_backward is true with fp16",
             "the first is not taken back where a gradient overflows.");
  }
}

}  // namespace zero
