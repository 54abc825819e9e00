// The vector kernels behind narrow.h. Note [Same bits everywhere] in kernels.h holds.
#pragma once

#include <cstdint>

namespace zero::optim::kernels {

/// The random bits of an array are hashed from this and the lower half of an element's number.
struct RoundingKey {
  uint32_t first = 0;
  uint32_t second = 0;
};
/// Returns the key of the elements whose numbers have the same upper 32 bits as `index`.
RoundingKey rounding_key_of(uint64_t key, int array, int64_t index);

/// Return 32 random bits. The mixing is Wellons's lowbias32, once with each half of the key.
constexpr uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}
constexpr uint32_t random_bits(RoundingKey key, uint32_t index) {
  return mixed(mixed(index ^ key.first) ^ key.second);
}

/// Converts bf16 to fp32.
void widen(const uint16_t* from, float* to, int64_t numel);
/// Converts fp32 to bf16 with stochastic rounding. Element i has the number `index` + i; the upper
/// 32 bits of the number are the same for all elements.
void round_stochastic(const float* from, uint16_t* to, int64_t numel, RoundingKey key,
                      uint32_t index);

}  // namespace zero::optim::kernels
