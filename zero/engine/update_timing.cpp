#include "zero/engine/update_timing.h"

namespace zero {

UpdateTiming UpdateTiming::of(const Config& config, partition::Sharding sharded,
                              const partition::RankGrid& grid) {
  UpdateTiming timing;
  const int64_t after = config.offload_optimizer.delayed_update_after;
  if (after > 0) timing.delayed_after = after;
  timing.in_backward = config.update_in_backward && sharded.gradients;
  timing.keeps_old_states = timing.in_backward && config.scales_loss();
  timing.in_next_forward = config.update_in_forward && !timing.delayed_after;
  // Ranks of one host may read slices in place, and with hpZ all of them are sent after the update.
  timing.memory_in_next_forward = timing.in_next_forward && !timing.in_backward &&
                                  sharded.parameters && grid.shard_group().hosts > 1 &&
                                  config.hpz_partition_size == 1;
  return timing;
}

// Sums in the device's memory belong to one step, so the update may keep them. Between two sweeps a
// unit holds more than its sum.
bool UpdateTiming::stays_in_memory(const UnitPlan& plan) const {
  return memory_in_next_forward && !plan.own_memory && plan.parameters_at == Tier::device &&
         plan.gradients_at == Tier::device && plan.optimizer_at == Tier::device &&
         plan.reach == optim::Reach::element;
}

}  // namespace zero
