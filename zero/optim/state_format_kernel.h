// The vector kernels behind state_format.h. Note [Same bits everywhere] in kernels.h holds.
#pragma once

#include <bit>
#include <cstdint>

#include "zero/optim/narrow_kernel.h"
#include "zero/optim/state_format.h"

namespace zero::optim::kernels {

/// The bits of a code's mantissa, and the bits of fp32's mantissa that are rounded away.
inline constexpr int kCodeMantissa = 4;
inline constexpr int kCodeRest = 23 - kCodeMantissa;

/// Returns the greatest exponent of a code, which the group's greatest element has. Codes of
/// exponent 0 are evenly spaced.
constexpr int top_exponent(Sign sign) { return sign == Sign::either ? 7 : 15; }
constexpr int32_t top_code(Sign sign) { return sign == Sign::either ? 0x7F : 0xFF; }

/// Returns the exponent of a group whose greatest magnitude has these bits of fp32. It is the
/// exponent of the magnitude, or one more if the greatest code would be less. 0 means that all are
/// zeros, and 255 that a number is infinite or NaN. It is at least kLeastExponent, so that no code
/// is a denormal.
inline constexpr uint32_t kLeastExponent = 24;
constexpr uint8_t group_exponent(uint32_t greatest) {
  if (greatest < 0x00800000U) return 0;
  if (greatest >= 0x7F800000U) return 255;
  const uint32_t exponent = (greatest + (1U << kCodeRest) - 1) >> 23;
  return static_cast<uint8_t>(exponent < kLeastExponent ? kLeastExponent
                              : exponent > 254          ? 254
                                                        : exponent);
}
/// Return the value of code exponent 1 in such a group, and its inverse (for exponents 1 to 254).
constexpr float group_unit(uint8_t exponent, Sign sign) {
  if (exponent == 0) return 0;
  if (exponent == 255) return std::bit_cast<float>(0x7FC00000U);
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 1 - top_exponent(sign)) << 23);
}
constexpr float inverse_group_unit(uint8_t exponent, Sign sign) {
  return std::bit_cast<float>(static_cast<uint32_t>(253 - exponent + top_exponent(sign)) << 23);
}

/// Does the same as decode of state_format.h, on this thread.
void decode(const uint8_t* blocks, float* values, int64_t numel, Sign sign);
/// Does the same as encode. With `key` it rounds stochastically, and element i has the number
/// `index` + i, as in round_stochastic of narrow_kernel.h; null rounds to nearest.
void encode(const float* values, uint8_t* blocks, int64_t numel, Sign sign, const RoundingKey* key,
            uint32_t index);

}  // namespace zero::optim::kernels
