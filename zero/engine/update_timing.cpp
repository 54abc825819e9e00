#include "zero/engine/update_timing.h"

namespace zero {

UpdateTiming UpdateTiming::of(const Config& config, partition::Sharding sharded) {
  UpdateTiming timing;
  const int64_t after = config.offload_optimizer.delayed_update_after;
  if (after > 0) timing.delayed_after = after;
  timing.in_backward = config.update_in_backward && sharded.gradients;
  timing.keeps_old_states = timing.in_backward && config.scales_loss();
  timing.in_next_forward = config.update_in_forward && !timing.delayed_after;
  return timing;
}

}  // namespace zero
