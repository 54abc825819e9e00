#include "zero/optim/state_format.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "zero/base/parallel.h"
#include "zero/optim/narrow_kernel.h"
#include "zero/optim/state_format_kernel.h"

namespace zero::optim {
namespace {

constexpr int64_t kBlocksAThread = 256;

const uint8_t* bytes_of(const std::byte* blocks) {
  return reinterpret_cast<const uint8_t*>(blocks);
}
uint8_t* bytes_of(std::byte* blocks) { return reinterpret_cast<uint8_t*>(blocks); }

// These give the place of an element's code, and of its group's exponent.
int64_t code_at(int64_t i) { return i / kCodedBlock * kCodedBytes + 4 + i % kCodedBlock; }
int64_t exponent_at(int64_t i) {
  return i / kCodedBlock * kCodedBytes + i % kCodedBlock / kCodedGroup;
}

// Calls sweep(begin, end) on LibTorch's intra-op threads, for whole blocks.
template <class Sweep>
void over_blocks(int64_t numel, const Sweep& sweep) {
  parallel_for(0, at::ceil_div(numel, kCodedBlock), kBlocksAThread,
               [&](int64_t first, int64_t last) {
                 sweep(first * kCodedBlock, std::min(last * kCodedBlock, numel));
               });
}

// Returns the magnitude of a code in units of code exponent 1.
double magnitude_of(int code) {
  constexpr int kCodes = 1 << kernels::kCodeMantissa;
  const int exponent = code / kCodes;
  const double mantissa = code % kCodes;
  if (exponent == 0) return mantissa / kCodes;
  return std::ldexp(1 + mantissa / kCodes, exponent - 1);
}

// Returns the number of the code at or below `magnitude`, or of the next one: that is taken if the
// part above the lower code, plus `random` / 2^kCodeRest, reaches one code.
int code_of(double magnitude, uint32_t random, int most) {
  constexpr double kPlaces = 1 << kernels::kCodeRest;
  constexpr int kCodes = 1 << kernels::kCodeMantissa;
  // Counts the magnitude in distances of codes. Below exponent 1 it keeps as many places as fp32
  // has there.
  double codes = 0;
  if (magnitude < 1) {
    codes = std::nearbyint(magnitude * kCodes * kPlaces) / kPlaces;
  } else {
    const int exponent = std::ilogb(magnitude);
    codes = kCodes * (std::ldexp(magnitude, -exponent) + exponent);
  }
  const double whole = std::floor(codes);
  const bool up = (codes - whole) * kPlaces + random >= kPlaces;
  return std::min(static_cast<int>(whole) + (up ? 1 : 0), most);
}

void encode_plainly(const float* values, std::byte* blocks, int64_t numel, Sign sign,
                    const std::function<uint32_t(int64_t)>& random) {
  auto* bytes = bytes_of(blocks);
  const auto magnitude = [&](int64_t i) {
    const float value = std::fabs(values[i]);
    return value < std::numeric_limits<float>::min() ? 0.0F : value;
  };
  for (int64_t first = 0; first < numel; first += kCodedGroup) {
    const int64_t last = std::min(first + kCodedGroup, numel);
    uint32_t greatest = 0;
    for (int64_t i = first; i < last; ++i)
      greatest = std::max(greatest, std::bit_cast<uint32_t>(magnitude(i)));
    const auto exponent = kernels::group_exponent(greatest);
    bytes[exponent_at(first)] = exponent;
    const bool codes = exponent != 0 && exponent != 255;
    for (int64_t i = first; i < last; ++i) {
      int code = 0;
      if (codes) {
        const double unit = kernels::group_unit(exponent, sign);
        code = code_of(magnitude(i) / unit, random(i), kernels::top_code(sign));
        if (sign == Sign::positive && magnitude(i) > 0) code = std::max(code, 1);
        if (sign == Sign::either && code > 0 && std::signbit(values[i])) code += 0x80;
      }
      bytes[code_at(i)] = static_cast<uint8_t>(code);
    }
  }
}

}  // namespace

void decode(const std::byte* blocks, float* values, int64_t numel, Sign sign) {
  over_blocks(numel, [&](int64_t begin, int64_t end) {
    kernels::decode(bytes_of(blocks) + state_bytes(StateFormat::eight_bit, begin), values + begin,
                    end - begin, sign);
  });
}

void encode(const float* values, std::byte* blocks, int64_t numel, Sign sign) {
  over_blocks(numel, [&](int64_t begin, int64_t end) {
    kernels::encode(values + begin, bytes_of(blocks) + state_bytes(StateFormat::eight_bit, begin),
                    end - begin, sign, nullptr, 0);
  });
}

void decode_reference(const std::byte* blocks, float* values, int64_t numel, Sign sign) {
  const auto* bytes = bytes_of(blocks);
  for (int64_t i = 0; i < numel; ++i) {
    const int code = bytes[code_at(i)];
    const bool negative = sign == Sign::either && code >= 0x80;
    const double unit = kernels::group_unit(bytes[exponent_at(i)], sign);
    values[i] = static_cast<float>((negative ? -1 : 1) *
                                   magnitude_of(negative ? code - 0x80 : code) * unit);
  }
}

void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign) {
  encode_plainly(values, blocks, numel, sign,
                 [](int64_t) { return uint32_t{1} << (kernels::kCodeRest - 1); });
}

void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign,
                      uint64_t key, int array, int64_t first) {
  encode_plainly(values, blocks, numel, sign, [&](int64_t i) {
    const int64_t index = first + i;
    const auto bits = kernels::random_bits(kernels::rounding_key_of(key, array, index),
                                           static_cast<uint32_t>(index));
    return bits >> (32 - kernels::kCodeRest);
  });
}

}  // namespace zero::optim
