// NF4 with double quantisation: every bit beside a reference in double, and the fast kernel beside
// the plain one.
#include "zero/optim/nf4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "packed_checks.h"
#include "tests/support/instruction_sets.h"

namespace zero::optim {
namespace {

constexpr std::array<int64_t, 8> kSizes{1, 63, 64, 100, 16384, 16385, 3 * 16384 + 77, 200'000};

std::vector<float> normal_numbers(int64_t numel, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(static_cast<size_t>(numel));
  for (auto& value : values) value = normal(generator);
  if (numel >= 192) std::fill(values.begin() + 64, values.begin() + 128, 0.0F);
  return values;
}

// Rows of 128 of very different lengths.
std::vector<float> uneven_rows(int64_t rows) {
  auto values = normal_numbers(128 * rows, 5);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] *= std::exp2(-static_cast<float>(i / 128 % 13));
  return values;
}

std::vector<std::byte> packed(const std::vector<float>& values) {
  return packed_in(BaseFormat::nf4, values);
}

/// Returns the numbers that fp8 (e4m3) can hold and that are not negative.
std::vector<double> fp8_magnitudes() {
  std::vector<double> all;
  for (int code = 0; code < 0x7F; ++code) {
    const double mantissa = code % 8;
    all.push_back(code < 8 ? mantissa / 8 * 0x1p-6 : std::ldexp(1 + mantissa / 8, code / 8 - 7));
  }
  return all;
}

/// Returns the code of the nearest number, the even one of two.
uint8_t fp8_code(double value) {
  static const auto magnitudes = fp8_magnitudes();
  size_t best = 0;
  for (size_t code = 1; code < magnitudes.size(); ++code) {
    const double now = std::abs(std::abs(value) - magnitudes[code]);
    const double before = std::abs(std::abs(value) - magnitudes[best]);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best + (std::signbit(value) ? 0x80 : 0));
}

double rounded_to_17_bits(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 17)), exponent - 17);
}

/// Computes the bytes, and the numbers read back in fp32, as they are defined: in double, by
/// search.
struct Reference {
  explicit Reference(const std::vector<float>& values) : numel(values.size()) {
    const size_t blocks = (values.size() + 63) / 64;
    const size_t second = (blocks + 255) / 256;
    std::vector<float> scales(blocks, 0);
    for (size_t i = 0; i < values.size(); ++i)
      scales[i / 64] = std::max(scales[i / 64], std::abs(values[i]));
    bytes.resize(32 * blocks + 4 + 4 * second + blocks);
    for (size_t i = 0; i < 64 * blocks; ++i) {
      const double value = i < values.size() ? values[i] : 0;
      int best = 7;  // zero
      for (int code = 0; code < 16 && scales[i / 64] > 0; ++code) {
        const auto distance = [&](int of) {
          return std::abs(value - double{kNf4Values[static_cast<size_t>(of)]} * scales[i / 64]);
        };
        if (distance(code) < distance(best)) best = code;
      }
      bytes[i / 2] |= static_cast<std::byte>(i % 2 == 0 ? best << 4 : best);
    }
    double sum = 0;
    for (const float scale : scales) sum += scale;
    const auto mean = static_cast<float>(sum / static_cast<double>(blocks));
    const double with_mean = encode_scales(scales, second, mean);
    const auto best = std::pair(bytes, read_back);
    if (!(encode_scales(scales, second, 0) < with_mean)) std::tie(bytes, read_back) = best;
  }

  /// Writes the scales around `offset`. Returns the sum of the squares of their relative errors.
  double encode_scales(const std::vector<float>& scales, size_t second, float offset) {
    double errors = 0;
    auto* constants = bytes.data() + 32 * scales.size();
    std::memcpy(constants, &offset, 4);
    read_back.clear();
    for (size_t s = 0; s < second; ++s) {
      const size_t end = std::min(scales.size(), 256 * (s + 1));
      float largest = 0;
      for (size_t b = 256 * s; b < end; ++b)
        largest = std::max(largest, std::abs(scales[b] - offset));
      // The least that Note [Quantised messages] has.
      const auto unit = static_cast<float>(std::max(rounded_to_17_bits(largest / 448), 0x1p-117));
      std::memcpy(constants + 4 + 4 * s, &unit, 4);
      for (size_t b = 256 * s; b < end; ++b) {
        const auto code = fp8_code((scales[b] - offset) * (1 / unit));
        constants[4 + 4 * second + b] = std::byte{code};
        const double magnitude = fp8_magnitudes()[code & 0x7F];
        const auto scale = static_cast<float>((code < 0x80 ? 1 : -1) * magnitude * unit + offset);
        if (scales[b] > 0) errors += std::pow((double{scale} - scales[b]) / scales[b], 2);
        for (size_t i = 64 * b; i < std::min(64 * b + 64, numel); ++i) {
          const auto both = static_cast<uint8_t>(bytes[i / 2]);
          const double number = kNf4Values[i % 2 == 0 ? both >> 4 : both & 0xF];
          read_back.push_back(static_cast<float>(number * scale));
        }
      }
    }
    return errors;
  }

  size_t numel;
  std::vector<std::byte> bytes;
  std::vector<float> read_back;
};

TEST(Nf4, TakesTheBitsThatThePaperSays) {
  for (const int64_t numel : kSizes)
    EXPECT_EQ(nf4_bytes(numel), packed(std::vector<float>(static_cast<size_t>(numel))).size());
  // 4 bits, 8 of 64, and 32 of 64 times 256; and the offset of the matrix.
  const int64_t numel = 4096 * 14336;
  EXPECT_EQ(8 * nf4_bytes(numel), 4 * numel + 8 * (numel / 64) + 32 * (numel / (64 * 256)) + 32);
  EXPECT_EQ(nf4_bytes(65), 2 * 32 + 4 + 4 + 2);
}

TEST(Nf4, HasEveryBitOfTheReferenceOnEveryInstructionSet) {
  on_each_instruction_set([&](const char* name) {
    SCOPED_TRACE(name);
    for (const int64_t numel : kSizes) {
      SCOPED_TRACE(numel);
      const auto values = normal_numbers(numel, 7);
      const Reference reference(values);
      const auto bytes = packed(values);
      ASSERT_EQ(bytes, reference.bytes);
      expect_reads_back(BaseFormat::nf4, bytes, reference.read_back);
    }
  });
}

TEST(Nf4, RowsThatAreMuchSmallerThanOthersAreNotLost) {
  const auto values = uneven_rows(500);
  const Reference reference(values);
  const auto bytes = packed(values);
  ASSERT_EQ(bytes, reference.bytes);
  expect_reads_back(BaseFormat::nf4, bytes, reference.read_back);
  for (size_t row = 0; row < values.size() / 128; ++row) {
    double error = 0;
    double sum = 0;
    for (size_t i = 128 * row; i < 128 * (row + 1); ++i) {
      error += std::pow(reference.read_back[i] - values[i], 2);
      sum += std::pow(values[i], 2);
    }
    EXPECT_LE(std::sqrt(error), 0.15 * std::sqrt(sum)) << row;
  }
}

TEST(Nf4, TheKernelHasTheBitsOfPlainLoops) { expect_bits_of_plain_loops(BaseFormat::nf4, kSizes); }

TEST(Nf4, IsNearAndKeepsZerosAndEnds) {
  auto values = normal_numbers(100'000, 11);
  values[70'000] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> back(values.size());
  const auto read_back = [&] {
    nf4_dequantise(packed(values).data(), 100'000, back.data(), c10::ScalarType::Float);
  };
  read_back();
  EXPECT_TRUE(std::all_of(back.begin(), back.end(), [](float value) { return std::isnan(value); }));
  values[70'000] = 0;
  read_back();
  double error = 0;
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    error += std::pow(back[i] - values[i], 2);
    sum += std::pow(values[i], 2);
    if (values[i] == 0) {
      EXPECT_EQ(back[i], 0);
    }
  }
  EXPECT_LT(std::sqrt(error / sum), 0.1);
}

}  // namespace
}  // namespace zero::optim
