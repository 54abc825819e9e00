// Packed exponents: every bit comes back, messages have the length of the formula, and the vector
// code says what the plain one does, with every instruction set.
#include "zero/comm/packed_exponents.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/instruction_sets.h"
#include "zero/partition/link_bytes.h"

namespace zero::comm {
namespace {

using c10::ScalarType;
using Bytes = std::vector<std::byte>;

constexpr auto kNumels = {0,   1,   2,   3,   63,   64,   65,   127,
                          128, 129, 191, 256, 1000, 4096, 5001, 20'000};

int64_t width_of(ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// The upper bits of fp32 numbers are bf16 ones.
Bytes array_of(ScalarType dtype, int64_t numel, const std::function<float(int64_t)>& value) {
  Bytes bytes(static_cast<size_t>(numel * width_of(dtype)));
  for (int64_t i = 0; i < numel; ++i) {
    const float number = value(i);
    const auto* from = reinterpret_cast<const std::byte*>(&number);
    const auto width = static_cast<size_t>(width_of(dtype));
    std::memcpy(bytes.data() + static_cast<size_t>(i) * width, from + 4 - width, width);
  }
  return bytes;
}

struct Sort {
  std::string name;
  std::function<float(int64_t)> value;
  bool fits = true;  // the array must not be so small that chance decides
};

std::vector<Sort> sorts() {
  static std::mt19937 random;
  random.seed(5);
  const auto gauss = [](int64_t) { return std::normal_distribution<float>(0, 0.02F)(random); };
  const auto any = [](int64_t) {
    const auto bits = static_cast<uint32_t>(random());
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  };
  const auto special = [gauss](int64_t i) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float all[] = {kInfinity, -kInfinity, std::nanf("7"),
                         -0.0F,     1e-42F,     std::numeric_limits<float>::max(),
                         0.0F};
    return i % 500 == 77 ? all[i / 500 % 7] : gauss(i);
  };
  // A block with a special number writes all others in full; of 20 000 there is room for two.
  const auto few_special = [gauss](int64_t i) {
    if (i == 3000) return std::numeric_limits<float>::infinity();
    return i == 7000 ? -std::nanf("3") : gauss(i);
  };
  return {{"a trained model's", gauss},
          {"zeros", [](int64_t) { return 0.0F; }},
          {"mostly zeros", [gauss](int64_t i) { return i % 5 == 0 ? gauss(i) : 0.0F; }},
          {"of a large range",
           [gauss](int64_t i) { return std::ldexp(gauss(i), i / 128 % 200 - 100); }},
          {"few of another size", [gauss](int64_t i) { return i % 200 == 3 ? 1e-12F : gauss(i); }},
          {"with special ones", special, false},
          {"with few special ones", few_special},
          {"any bits", any, false}};
}

TEST(PackedExponents, ComeBackWithEveryBit) {
  on_each_instruction_set([](const char* set) {
    for (const auto& sort : sorts()) {
      for (const auto dtype : {ScalarType::BFloat16, ScalarType::Float}) {
        for (const int64_t numel : kNumels) {
          SCOPED_TRACE(std::string(set) + ", " + sort.name + ", " + std::to_string(numel) +
                       (dtype == ScalarType::Float ? " fp32" : " bf16"));
          const auto values = array_of(dtype, numel, sort.value);
          const auto bytes = static_cast<size_t>(packed_bytes(dtype, numel));
          // The code touches nothing beyond the message, and depends on nothing that was there.
          Bytes message(bytes + 3, std::byte{0x5A});
          const bool fits = pack_exponents(message.data() + 1, values.data(), dtype, numel);
          EXPECT_EQ(message.front(), std::byte{0x5A});
          EXPECT_EQ(message[bytes + 1], std::byte{0x5A});
          EXPECT_EQ(is_packed(message.data() + 1, numel), fits);
          const bool special = sort.name.find("special") != std::string::npos;
          if (numel >= (special ? 20000 : 1000) && sort.name != "with special ones") {
            EXPECT_EQ(fits, sort.fits);
          }

          Bytes plain(bytes, std::byte{0x5A});
          EXPECT_EQ(pack_exponents(plain.data(), values.data(), dtype, numel, /*plainly=*/true),
                    fits);
          EXPECT_TRUE(std::equal(plain.begin(), plain.end(), message.begin() + 1));

          const auto rest = static_cast<size_t>(fits ? 0 : rest_bytes(dtype, numel));
          for (const bool plainly : {false, true}) {
            Bytes back(values.size() + 1, std::byte{0xA5});
            unpack_exponents(back.data(), dtype, message.data() + 1, numel, plainly);
            EXPECT_EQ(back.back(), std::byte{0xA5});
            EXPECT_TRUE(std::equal(values.begin(), values.end() - static_cast<ptrdiff_t>(rest),
                                   back.begin()));
          }
        }
      }
    }
  });
}

TEST(PackedExponents, TakeTheBytesOfTheFormula) {
  for (const auto dtype : {ScalarType::BFloat16, ScalarType::Float}) {
    const partition::Wire wire{.bits = 8 * width_of(dtype), .packed = true};
    for (int64_t numel = 0; numel < 2000; ++numel) {
      EXPECT_EQ(packed_bytes(dtype, numel), wire.bytes(numel)) << numel;
      // Messages of parts have the bytes of the message of the whole.
      EXPECT_EQ(packed_bytes(dtype, 3 * kExponentBlock) + packed_bytes(dtype, numel),
                packed_bytes(dtype, 3 * kExponentBlock + numel));
      EXPECT_GE(rest_bytes(dtype, numel), 0);
      EXPECT_TRUE(numel < kExponentBlock || packed_bytes(dtype, numel) < numel * width_of(dtype));
    }
  }
  // The ratios are 12.2 of 16 bits, and 28.2 of 32.
  EXPECT_EQ(packed_bytes(ScalarType::BFloat16, 1 << 20) * 8, 12.1875 * (1 << 20));
  EXPECT_EQ(packed_bytes(ScalarType::Float, 1 << 20) * 8, 28.1875 * (1 << 20));
}

}  // namespace
}  // namespace zero::comm
