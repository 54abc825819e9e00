#include "zero/data/permutation.h"

#include <bit>

#include "zero/base/error.h"
#include "zero/base/mix.h"

namespace zero {
Permutation::Permutation(int64_t size, uint64_t seed, uint64_t epoch)
    : size_(static_cast<uint64_t>(size)) {
  ensure(size > 0, "a permutation of something");
  half_bits_ = (std::bit_width(size_ - 1) + 1) / 2;
  uint64_t state = mix(mix(seed) ^ epoch);
  for (auto& key : keys_) key = state = mix(state);
}

int64_t Permutation::operator()(int64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<uint64_t>(index);
  // The network permutes [0, 4^h), less than four times the size; a walk from inside comes back
  // inside.
  do {
    uint64_t left = value >> half_bits_;
    uint64_t right = value & mask;
    for (const auto key : keys_) {
      const uint64_t next = left ^ (mix(right ^ key) & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= size_);
  return static_cast<int64_t>(value);
}

}  // namespace zero
