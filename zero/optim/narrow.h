// Updates of weights, and of moments, that are kept in bf16 without fp32 ones beside them.
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

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <limits>

#include "zero/optim/optimizer.h"

namespace zero::optim {

/// A contiguous range of one segment on this rank. Arrays have `numel` elements.
struct NarrowRange {
  int64_t numel = 0;
  uint16_t* weights = nullptr;  ///< bf16, updated in place
  /// As state_names() orders them, of `state_dtype`, which is Float or BFloat16; else null.
  std::array<void*, 2> state{};
  c10::ScalarType state_dtype = c10::ScalarType::Float;
  const void* gradient = nullptr;  ///< as in Range
  c10::ScalarType gradient_dtype = c10::ScalarType::Float;
  float gradient_limit = std::numeric_limits<float>::infinity();  ///< as in Range
  uint64_t key = 0;   ///< of the random bits: another for each step and unit
  int64_t first = 0;  ///< number of the first element among those of that key
};

/// As update() of a Range.
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
