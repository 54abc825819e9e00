// Splits fp32 numbers into two halves of 16 bits.
//
// Note [Split master weights]
// A bf16 number is the upper 16 bits of an fp32 number. So a bf16 parameter is half of its fp32
// master weight, and only the other half must be kept with the optimizer states. That takes 2 bytes
// a parameter instead of 4 (14 instead of 16 with Adam's moments and the gradient), and the update
// moves 2 bytes less. Split-SGD (2005.04680) cuts the lower half off. Here the parameter is the
// master rounded to nearest, as without splitting, and the lower half is the signed rest. Ties
// round away from zero (without splitting: to even), since the rest of a tie that may go either way
// would take one more bit.
//
// Nothing is lost: the update computes with the same fp32 values. Code that writes a parameter from
// outside sets the upper half alone: the master is then the written number plus at most half of a
// bf16 number's last place. Engine::set_parameter and loading set both halves.
#pragma once

#include <bit>
#include <cstdint>

namespace zero::optim {

struct Halves {
  uint16_t upper;  ///< the bits of a bf16 number: the value rounded to nearest
  uint16_t lower;  ///< the rest, as a signed number in units of fp32's last place
};

/// Splits a number. `join` gives every bit pattern back. The upper half of a NaN is a NaN if the
/// NaN is quiet and its payload is not all ones, which is so for every NaN that arithmetic makes.
constexpr Halves split(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return {static_cast<uint16_t>((bits + 0x8000U) >> 16), static_cast<uint16_t>(bits)};
}

constexpr float join(Halves halves) {
  const auto rest = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(halves.lower)));
  return std::bit_cast<float>((static_cast<uint32_t>(halves.upper) << 16) + rest);
}

/// Returns the new `lower` after something else has written `upper`. It is 0 beside zero, infinity
/// and NaN, since no numbers lie near them.
constexpr uint16_t lower_beside_written(Halves halves) {
  const auto magnitude = halves.upper & 0x7FFFU;
  return magnitude == 0 || magnitude >= 0x7F80U ? uint16_t{0} : halves.lower;
}

}  // namespace zero::optim
