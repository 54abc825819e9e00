// Updates of weights in bf16 without fp32 ones beside them, and of moments in bf16 or 8 bits.
//
// Note [Stochastic rounding]
// An update is often less than half of a bf16 number's last place, and rounding to nearest would
// lose it every time; Adam's second moment moves by a thousandth a step, which bf16 cannot hold
// either. So a result is rounded up with the probability of what it is above the lower neighbour
// (1502.02551): right on average. The update itself is that of fp32 states (optimizer.h), on a few
// blocks at a time.
//
// The random bits are a hash of the element's number, the array and a key: not of the slice, the
// threads or the instruction set. So results are the same at every number of ranks, and those of a
// run that was resumed.
#pragma once

#include <array>
#include <cstdint>

#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero::optim {

/// A range whose weights, or states, or both are narrower than fp32.
struct NarrowRange {
  /// One segment on this rank. It has no `state`, and no weights where these are `weights`.
  Range wide{};
  uint16_t* weights = nullptr;  ///< bf16 that are their own master weights; else null
  /// As state_names() orders them, of `state_format`; else null.
  std::array<void*, kMostStates> state{};
  StateFormat state_format = StateFormat::fp32;
  uint64_t key = 0;  ///< of the random bits: another for each step and unit
  /// Number of the first element among those of that key; with 8-bit states a multiple of
  /// kCodedBlock.
  int64_t first = 0;
};

/// Does the same as update() of a Range.
void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const NarrowRange& range);
/// The same in plain loops: what it is tested against, in bits.
void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const NarrowRange& range);

/// The key of update number `step` of a unit.
uint64_t rounding_key(int64_t unit, int64_t step);
/// `value` in bf16, rounded by the random bits of element `index` of array `array` (0: weights).
uint16_t round_stochastic(float value, uint64_t key, int array, int64_t index);

}  // namespace zero::optim
