// A random order of any number of things that takes no memory.
#pragma once

#include <array>
#include <cstdint>

namespace zero {

/// A permutation of [0, size), decided by `seed` and `epoch` alone: a Feistel network over the next
/// power of four, walked until it lands inside. It is the same on every machine.
class Permutation {
 public:
  /// `size` must be positive.
  Permutation(int64_t size, uint64_t seed, uint64_t epoch);
  /// Returns the place to which `index` of [0, size) goes.
  int64_t operator()(int64_t index) const;

 private:
  static constexpr int kRounds = 6;

  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace zero
