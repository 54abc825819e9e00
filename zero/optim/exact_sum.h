// Sums that do not depend on the order of additions.
//
// Note [Exact sums]
// A parameter's norm is summed over slices that depend on the number of ranks, so a rounded sum
// would depend on it too. The sum of squares of fp32 numbers is therefore kept exactly, as a
// fixed-point number of 640 bits in digits of 32 bits (Kulisch's accumulator). Its summands are
// sums of `kBlock` squares in fp64, each made in one fixed order: slices begin at multiples of 64
// elements, so no block lies in two slices. Each block costs a few integer additions.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace zero::optim {

/// An exact sum of fp64 numbers. Each is not negative, a multiple of 2^-320, and less than 2^288.
class ExactSum {
 public:
  static constexpr int64_t kBlock = 64;  ///< elements whose squares are added in fp64 first
  static constexpr size_t kDigits = 20;
  static constexpr int kLowest = -320;  ///< exponent of the first digit's last bit
  /// The sum in 64-bit words, which add up over ranks: the digits, and the count of numbers that
  /// were not finite.
  static constexpr size_t kWords = kDigits + 1;

  void add(double value) {
    constexpr int kBias = 1075;
    if (!std::isfinite(value)) {
      ++words_[kDigits];
      return;
    }
    const auto bits = std::bit_cast<uint64_t>(value);
    const auto exponent = static_cast<int>(bits >> 52 & 0x7FF);
    if (exponent == 0) return;  // below 2^-320: zero
    uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
    int place = exponent - kBias - kLowest;
    if (place < 0) {  // its last bits are zeros
      mantissa >>= -place;
      place = 0;
    }
    const auto digit = static_cast<size_t>(place) / 32;
    const int shift = place % 32;
    const uint64_t low = mantissa << shift;
    const uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
    words_[digit] += low & 0xFFFFFFFF;
    words_[digit + 1] += low >> 32;
    words_[digit + 2] += high;
  }

  void add(const ExactSum& other) {
    auto theirs = other;
    theirs.carry();
    carry();
    for (size_t i = 0; i < kWords; ++i) words_[i] += theirs.words_[i];
  }

  /// Returns the rounded sum, which is the same for equal sums, or NaN if a number was not finite.
  double value() const {
    if (words_[kDigits] != 0) return std::numeric_limits<double>::quiet_NaN();
    auto sum = *this;
    sum.carry();
    double value = 0;
    for (size_t i = 0; i < kDigits; ++i)
      value += std::ldexp(static_cast<double>(sum.words_[i]), kLowest + 32 * static_cast<int>(i));
    return value;
  }

 private:
  // Carries, so that every digit but the last is below 2^32.
  void carry() {
    for (size_t i = 0; i + 1 < kDigits; ++i) {
      words_[i + 1] += words_[i] >> 32;
      words_[i] &= 0xFFFFFFFF;
    }
  }

  std::array<uint64_t, kWords> words_{};
};

}  // namespace zero::optim
