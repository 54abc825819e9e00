// Memory for transfers.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "zero/store/file.h"

namespace zero::store {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

/// Zeros, or with a seed numbers at random.
inline Memory memory(int64_t bytes, uint32_t seed = 0) {
  Memory result(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes))));
  std::mt19937 random(seed);
  for (int64_t i = 0; i < bytes; i += 4) {
    const uint32_t value = seed == 0 ? 0 : static_cast<uint32_t>(random());
    std::memcpy(result.get() + i, &value, 4);
  }
  return result;
}

inline bool equal(const Memory& a, const Memory& b, int64_t bytes) {
  return std::memcmp(a.get(), b.get(), static_cast<size_t>(bytes)) == 0;
}

}  // namespace zero::store
