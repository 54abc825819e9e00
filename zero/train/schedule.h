// The learning rate of each step.
#pragma once

#include <cstdint>
#include <string_view>

namespace zero::train {

enum class Decay : uint8_t { constant, linear, cosine };

/// "constant", "linear" or "cosine". Throws ConfigError for another name, with the nearest.
Decay decay_from(std::string_view name);
std::string_view name(Decay decay);

/// Linear warm-up to the peak, then a decay that reaches the floor at the last step. Steps count
/// from 1.
struct Schedule {
  double peak = 3e-4;
  double floor = 0;
  int64_t warmup = 0;  ///< steps: step s of them has s / warmup of the peak, so that the first one
                       ///< already learns
  int64_t steps = 1;
  Decay decay = Decay::cosine;

  /// The rate of `step`; of a step past the last, the floor (constant: the peak).
  double rate(int64_t step) const;
};

}  // namespace zero::train
