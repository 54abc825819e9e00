// Updates of weights in bf16 that have no fp32 weights beside them, and of moments in bf16 or 8
// bits.
//
// Note [Stochastic rounding]
// An update is often less than half of a bf16 number's last place, and rounding to nearest would
// lose it every time. Adam's second moment moves by a thousandth in a step, which bf16 cannot hold
// either. So a result lies between two bf16 numbers, and is rounded up with a probability that is
// its distance from the lower one in units of their distance (1502.02551): it is right on average.
// The update itself is that of fp32 states (optimizer.h), on a few blocks at a time.
//
// The random bits are a hash of the element's number, the array and a key. They do not depend on
// the slice, the threads or the instruction set. So results are the same on every number of ranks,
// and in a run that was resumed.
#pragma once

#include <array>
#include <cstdint>

#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero::optim {

/// Operands of an update whose weights, or states, or both are narrower than fp32.
struct NarrowOperands {
  /// One segment on this rank. It has no `state`, and it has no weights if `weights` is set.
  Operands wide{};
  uint16_t* weights = nullptr;  ///< bf16 weights that are their own master weights, or null
  /// The states in the order of state_names(), in `state_format`; else null.
  std::array<void*, kMostStates> state{};
  StateFormat state_format = StateFormat::fp32;
  /// The key of the random bits. It differs for each step and unit.
  uint64_t key = 0;
  /// The number of the first element among those of the key. With 8-bit states it is a multiple of
  /// kCodedBlock.
  int64_t first = 0;
};

/// Does the same as update() of Operands, on a device too.
void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const NarrowOperands& operands);
/// Does the same in plain loops. Tests compare `update` with it in bits.
void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const NarrowOperands& operands);

/// Returns the key of update number `step` of a unit.
uint64_t rounding_key(int64_t unit, int64_t step);
/// Returns `value` in bf16, rounded by the random bits of element `index` of array `array` (0:
/// weights).
uint16_t round_stochastic(float value, uint64_t key, int array, int64_t index);

}  // namespace zero::optim
