// How fast the host updates: what an offloaded step is compared with.
#pragma once

#include <c10/core/ScalarType.h>

#include "zero/optim/optimizer.h"

namespace zero::optim {

/// Returns the bytes a second that updates of `optimizer` pass over here, with the threads that
/// LibTorch has in this process: the best of a few over 8 million elements, which fit in no cache.
/// Each passes once over a gradient in fp32 and a copy of the weights in `parameter` (BFloat16 or
/// Half; Float: none), and twice over master weights and states. `optimizer` must be element-wise.
double best_update_speed(const Optimizer& optimizer, c10::ScalarType parameter);

}  // namespace zero::optim
