// Arrays for the tests of optimizers: at any alignment, with guards beside them, compared as bits.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace zero::optim {

/// `numel` elements that start `offset` elements past a cache line's beginning, with a guard behind
/// and before them.
template <class T>
class Array {
 public:
  Array(int64_t numel, int64_t offset) : numel_(numel), offset_(offset + kGuard) {
    bytes_.assign(static_cast<size_t>(numel + offset + 3 * kGuard) * sizeof(T), std::byte{0x5A});
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data()) % kLine;
    offset_ += static_cast<int64_t>((kLine - at) % kLine / sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data()) + offset_; }
  bool guards_intact() const {
    const auto first = static_cast<size_t>(offset_) * sizeof(T);
    const auto last = static_cast<size_t>(offset_ + numel_) * sizeof(T);
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < first || i >= last) && bytes_[i] != std::byte{0x5A}) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 32;
  static constexpr size_t kLine = 64;  // bytes
  int64_t numel_;
  int64_t offset_;
  std::vector<std::byte> bytes_;
};

/// Equal bits; any NaN equals any other, since which operand's payload survives is not defined.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

inline float widen(const void* values, c10::ScalarType dtype, int64_t i) {
  if (dtype == c10::ScalarType::Float) return static_cast<const float*>(values)[i];
  if (dtype == c10::ScalarType::BFloat16) return static_cast<const c10::BFloat16*>(values)[i];
  return static_cast<const c10::Half*>(values)[i];
}

inline void narrow(void* values, c10::ScalarType dtype, int64_t i, float value) {
  if (dtype == c10::ScalarType::Float) {
    static_cast<float*>(values)[i] = value;
  } else if (dtype == c10::ScalarType::BFloat16) {
    static_cast<c10::BFloat16*>(values)[i] = value;
  } else {
    static_cast<c10::Half*>(values)[i] = value;
  }
}

/// Numbers of every size that training meets, and some it should not: zeros of both signs,
/// subnormals, infinities, NaN.
class Numbers {
 public:
  explicit Numbers(uint32_t seed, bool special = false) : generator_(seed), special_(special) {}
  float next() {
    if (special_ && generator_() % 16 == 0) {
      using limits = std::numeric_limits<float>;
      static constexpr float kSpecial[] = {0.0F,
                                           -0.0F,
                                           limits::infinity(),
                                           1e-40F,
                                           limits::max(),
                                           -limits::infinity(),
                                           -3e-39F,
                                           limits::lowest(),
                                           limits::quiet_NaN(),
                                           65519.996F,
                                           65520.0F,
                                           5.9e-8F,
                                           2.9802322e-8F,
                                           6.1e-5F,
                                           -1e-6F};
      return kSpecial[generator_() % std::size(kSpecial)];
    }
    const float magnitude = std::ldexp(1.0F, static_cast<int>(generator_() % 24) - 20);
    return magnitude * std::normal_distribution<float>()(generator_);
  }

 private:
  std::mt19937 generator_;
  bool special_;
};

inline const std::vector<c10::ScalarType>& dtypes() {
  static const std::vector<c10::ScalarType> all{c10::ScalarType::Float, c10::ScalarType::BFloat16,
                                                c10::ScalarType::Half};
  return all;
}

}  // namespace zero::optim
