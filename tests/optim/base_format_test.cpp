// INT8 by blocks: every bit beside a reference in double, and the fast kernel beside the plain one.
#include "zero/optim/base_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "packed_checks.h"
#include "tests/support/instruction_sets.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"

namespace zero::optim {
namespace {

using ::testing::HasSubstr;

constexpr std::array<int64_t, 7> kSizes{1, 127, 128, 129, 1000, 128 * 512 + 1, 200'000};

std::vector<std::byte> packed(const std::vector<float>& values) {
  return packed_in(BaseFormat::int8, values);
}

std::vector<float> normal_numbers(int64_t numel) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(static_cast<size_t>(numel));
  for (auto& value : values) value = normal(generator);
  if (numel >= 384) std::fill(values.begin() + 128, values.begin() + 256, 0.0F);
  return values;
}

double rounded_to_17_bits(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 17)), exponent - 17);
}

/// Computes the bytes, and the numbers read back in fp32, as they are defined.
struct Reference {
  explicit Reference(const std::vector<float>& values) {
    const size_t blocks = (values.size() + 127) / 128;
    bytes.resize(4 * blocks + values.size());
    for (size_t b = 0; b < blocks; ++b) {
      const size_t end = std::min(128 * b + 128, values.size());
      float largest = 0;
      for (size_t i = 128 * b; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
      // The least that Note [Quantised messages] has.
      const auto unit = static_cast<float>(std::max(rounded_to_17_bits(largest / 127), 0x1p-117));
      std::memcpy(bytes.data() + 4 * b, &unit, 4);
      for (size_t i = 128 * b; i < end; ++i) {
        const double code = std::nearbyint(values[i] * (1 / unit));
        bytes[4 * blocks + i] = static_cast<std::byte>(static_cast<int8_t>(code));
        read_back.push_back(static_cast<float>(code * unit) + 0.0F);  // no negative zero
      }
    }
  }

  std::vector<std::byte> bytes;
  std::vector<float> read_back;
};

TEST(Int8Base, TakesTheBytesOfTheFormula) {
  for (const int64_t numel : kSizes)
    EXPECT_EQ(packed_bytes(BaseFormat::int8, numel), numel + 4 * ((numel + 127) / 128));
  const int64_t numel = 4096 * 14336;
  EXPECT_EQ(8 * packed_bytes(BaseFormat::int8, numel), 8 * numel + numel / 4) << "8.25 bits";
}

TEST(Int8Base, HasEveryBitOfTheReferenceOnEveryInstructionSet) {
  on_each_instruction_set([&](const char* name) {
    SCOPED_TRACE(name);
    for (const int64_t numel : kSizes) {
      SCOPED_TRACE(numel);
      const auto values = normal_numbers(numel);
      const Reference reference(values);
      const auto bytes = packed(values);
      ASSERT_EQ(bytes, reference.bytes);
      expect_reads_back(BaseFormat::int8, bytes, reference.read_back);
    }
  });
}

TEST(Int8Base, TheKernelHasTheBitsOfPlainLoops) {
  expect_bits_of_plain_loops(BaseFormat::int8, kSizes);
}

TEST(Int8Base, ABlockWithWhatIsNoNumberIsNone) {
  auto values = normal_numbers(1000);
  values[300] = std::numeric_limits<float>::infinity();
  std::vector<float> back(values.size());
  unpack(BaseFormat::int8, packed(values).data(), 1000, back.data(), c10::ScalarType::Float);
  for (size_t i = 0; i < back.size(); ++i) {
    if (i / 128 == 300 / 128) {
      EXPECT_TRUE(std::isnan(back[i])) << i;
    } else {
      EXPECT_NEAR(back[i], values[i], 0.1 / 254) << i;  // half of a step, of magnitudes below 0.1
    }
  }
}

TEST(BaseFormats, HaveNames) {
  EXPECT_EQ(packed_format(name_of(BaseFormat::nf4)), BaseFormat::nf4);
  EXPECT_EQ(packed_format(name_of(BaseFormat::int8)), BaseFormat::int8);
  for (const auto* name : {"none", "int4"})
    EXPECT_THAT(message_of<ConfigError>([&] { packed_format(name); }), HasSubstr("nf4 or int8"));
}

}  // namespace
}  // namespace zero::optim
