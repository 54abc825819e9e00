// Quantised messages: their errors, and the vector code against the plain one.
#include "zero/comm/quantise_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
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

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

std::vector<Quantisation> all_quantisations() {
  std::vector<Quantisation> all;
  for (const auto format : {WireFormat::int8, WireFormat::int4, WireFormat::fp8})
    for (const int64_t block : {64, 128, 192, 256}) all.push_back({format, block});
  return all;
}

std::string describe(const Quantisation& q) {
  const char* names[] = {"int8", "int4", "fp8"};
  return std::string(names[static_cast<size_t>(q.format)]) + " by " + std::to_string(q.block);
}

float greatest_code(const Quantisation& q) {
  return q.format == WireFormat::int8 ? 127 : q.format == WireFormat::int4 ? 7 : 448;
}

// An array of one dtype, at a place that is aligned for its elements alone.
class Array {
 public:
  Array(ScalarType dtype, std::vector<float> values, size_t shift = 0)
      : dtype_(dtype),
        numel_(values.size()),
        offset_(shift * size()),
        bytes_(offset_ + numel_ * size() + kGuard, std::byte{0x5A}) {
    for (size_t i = 0; i < numel_; ++i) set(i, values[i]);
  }
  ScalarType dtype() const { return dtype_; }
  int64_t numel() const { return static_cast<int64_t>(numel_); }
  void* data() { return bytes_.data() + offset_; }
  const void* data() const { return bytes_.data() + offset_; }
  float operator[](size_t i) const {
    if (dtype_ == ScalarType::BFloat16) return static_cast<const c10::BFloat16*>(data())[i];
    if (dtype_ == ScalarType::Half) return static_cast<const c10::Half*>(data())[i];
    return static_cast<const float*>(data())[i];
  }
  // Compares bits, except for which NaN a NaN is, and the bytes beside the elements too.
  bool operator==(const Array& other) const {
    if (numel_ != other.numel_) return false;
    for (size_t i = 0; i < numel_; ++i) {
      const bool nan = std::isnan((*this)[i]);
      if (nan != std::isnan(other[i])) return false;
      if (!nan && std::bit_cast<uint32_t>((*this)[i]) != std::bit_cast<uint32_t>(other[i]))
        return false;
    }
    return std::equal(bytes_.end() - kGuard, bytes_.end(), other.bytes_.end() - kGuard);
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size() const { return c10::elementSize(dtype_); }
  void set(size_t i, float value) {
    if (dtype_ == ScalarType::BFloat16) {
      static_cast<c10::BFloat16*>(data())[i] = value;
    } else if (dtype_ == ScalarType::Half) {
      static_cast<c10::Half*>(data())[i] = value;
    } else {
      static_cast<float*>(data())[i] = value;
    }
  }
  ScalarType dtype_;
  size_t numel_, offset_;
  std::vector<std::byte> bytes_;
};

constexpr ScalarType kDtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

std::vector<float> normal_values(int64_t numel, uint64_t seed, float scale = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(numel));
  for (auto& value : values) value = normal(random);
  return values;
}

// Returns numbers of all magnitudes; `special` of 256 are zeros of both signs, infinities, NaN and
// the greatest and least numbers.
std::vector<float> any_values(int64_t numel, uint64_t seed, uint64_t special) {
  const float specials[] = {0,
                            -0.0F,
                            kInfinity,
                            -kInfinity,
                            kMost,
                            -kMost,
                            std::numeric_limits<float>::denorm_min(),
                            -std::numeric_limits<float>::min(),
                            std::nanf(""),
                            1};
  std::mt19937_64 random(seed);
  std::vector<float> values(static_cast<size_t>(numel));
  for (auto& value : values) {
    if (random() % 256 < special) {
      value = specials[random() % std::size(specials)];
    } else {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));
      if (!std::isfinite(value)) value = 1;
    }
  }
  return values;
}

// Returns each kind of block once, one behind the other.
std::vector<float> extreme_values(int64_t block) {
  std::vector<float> values;
  const auto add = [&](float largest) {
    for (int64_t i = 0; i < block; ++i)
      values.push_back(largest * (static_cast<float>(2 * (i % 8) - 7) / 7));
  };
  for (const float largest :
       {0.0F, 1.0F, kMost, 3.4e38F, 1e-30F, 0x1p-117F, 1e-36F, 1e-38F,
        std::numeric_limits<float>::min(), 1e-42F, std::numeric_limits<float>::denorm_min()})
    add(largest);
  values[1] = -0.0F;
  return values;
}

std::vector<std::byte> message_of(const Array& values, const Quantisation& q) {
  std::vector<std::byte> message(static_cast<size_t>(wire_bytes(q, values.numel())));
  quantise(message.data(), values.data(), values.dtype(), values.numel(), q);
  return message;
}

Array array_of(ScalarType dtype, const std::vector<std::byte>& message, int64_t numel,
               const Quantisation& q) {
  Array values(dtype, std::vector<float>(static_cast<size_t>(numel)));
  dequantise(values.data(), dtype, message.data(), numel, q);
  return values;
}

void for_all(const std::function<void(const Quantisation&)>& body) {
  on_each_instruction_set([&](const char* instructions) {
    SCOPED_TRACE(instructions);
    for (const auto& q : all_quantisations()) {
      SCOPED_TRACE(describe(q));
      body(q);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST(Quantise, TakesTheBytesOfAScaleABlockAndACodeAnElement) {
  EXPECT_EQ(wire_bytes({WireFormat::int8, 64}, 0), 0);
  EXPECT_EQ(wire_bytes({WireFormat::int8, 64}, 1), 4 + 1);
  EXPECT_EQ(wire_bytes({WireFormat::int8, 64}, 128), 2 * 4 + 128);
  EXPECT_EQ(wire_bytes({WireFormat::int8, 64}, 129), 3 * 4 + 129);
  EXPECT_EQ(wire_bytes({WireFormat::fp8, 256}, 512), 2 * 4 + 512);
  EXPECT_EQ(wire_bytes({WireFormat::int4, 256}, 512), 2 * 4 + 256);
  EXPECT_EQ(wire_bytes({WireFormat::int4, 64}, 64 + 3), 2 * 4 + 32 + 2);
  EXPECT_EQ(blocks_of({WireFormat::int4, 64}, 64 + 3), 2);
  // An element of bf16 has 2 bytes: messages have a half, and a quarter, of them beside the scales.
  EXPECT_EQ(wire_bytes({WireFormat::int8, 128}, 1 << 20), (1 << 20) * 33 / 32);
  EXPECT_EQ(wire_bytes({WireFormat::int4, 128}, 1 << 20), (1 << 19) * 17 / 16);
}

TEST(Quantise, TakesTheBytesOfTheFormula) {
  for (const auto& q : all_quantisations()) {
    const partition::Wire wire{q.format == WireFormat::int4 ? 4 : 8, q.block};
    for (const int64_t numel : {0, 1, 63, 64, 65, 192, 1000, 4096})
      EXPECT_EQ(wire_bytes(q, numel), wire.bytes(numel)) << describe(q) << ", " << numel;
  }
}

TEST(Quantise, EqualsThePlainLoopForAnyBitsTailsAndAlignments) {
  for_all([](const Quantisation& q) {
    for (const auto dtype : kDtypes) {
      for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{31}, q.block - 1,
                                  q.block, q.block + 1, 2 * q.block, 3 * q.block + 64 - 1}) {
        for (const size_t shift : {0, 1, 3}) {
          for (const uint64_t special : {0, 4}) {
            const Array values(dtype, any_values(numel, static_cast<uint64_t>(numel), special),
                               shift);
            const auto bytes = static_cast<size_t>(wire_bytes(q, numel));
            std::vector<std::byte> fast(bytes + shift + 64, std::byte{0x5A});
            auto plain = fast;
            quantise(fast.data() + shift, values.data(), dtype, numel, q);
            quantise(plain.data() + shift, values.data(), dtype, numel, q, {}, Loops::plain);
            ASSERT_TRUE(fast == plain) << numel << " of " << dtype;
            Array read(dtype, std::vector<float>(static_cast<size_t>(numel)), shift);
            Array read_plainly(dtype, std::vector<float>(static_cast<size_t>(numel)), shift);
            dequantise(read.data(), dtype, fast.data() + shift, numel, q);
            dequantise(read_plainly.data(), dtype, plain.data() + shift, numel, q, {},
                       Loops::plain);
            ASSERT_TRUE(read == read_plainly) << numel << " of " << dtype;
            Array sum(ScalarType::Float, normal_values(numel, 7), shift);
            Array sum_plainly(ScalarType::Float, normal_values(numel, 7), shift);
            dequantise_add(static_cast<float*>(sum.data()), fast.data() + shift, numel, q);
            dequantise_add(static_cast<float*>(sum_plainly.data()), plain.data() + shift, numel, q,
                           {}, Loops::plain);
            ASSERT_TRUE(sum == sum_plainly) << numel << " of " << dtype;
          }
        }
      }
    }
  });
}

TEST(Quantise, EqualsThePlainLoopAtTheExtremes) {
  for_all([](const Quantisation& q) {
    const Array values(ScalarType::Float, extreme_values(q.block));
    std::vector<std::byte> plain(static_cast<size_t>(wire_bytes(q, values.numel())));
    quantise(plain.data(), values.data(), values.dtype(), values.numel(), q, {}, Loops::plain);
    ASSERT_TRUE(message_of(values, q) == plain);
  });
}

// Every code, and values halfway between two: ties go to the even one.
TEST(Quantise, RoundsToTheNearestCodeTiesToEven) {
  for_all([](const Quantisation& q) {
    if (q.format == WireFormat::fp8) return;
    std::vector<float> values(static_cast<size_t>(q.block));
    const float most = greatest_code(q);
    values[0] = most;  // makes the scale 1
    const float tested[] = {0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 2.4F, 2.6F, -2.6F, 6.49F};
    const float expected[] = {0, 2, 2, 0, -2, -2, 2, 3, -3, 6};
    std::copy(std::begin(tested), std::end(tested), values.begin() + 1);
    const Array array(ScalarType::Float, values);
    const auto read = array_of(ScalarType::Float, message_of(array, q), q.block, q);
    EXPECT_EQ(read[0], most);
    for (size_t i = 0; i < std::size(expected); ++i)
      EXPECT_EQ(read[1 + i], expected[i]) << tested[i];
  });
}

TEST(Quantise, HasEveryNumberOfFp8) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    const Quantisation q{WireFormat::fp8, 256};
    std::vector<float> values(256);
    for (int code = 0; code < 0x7F; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      const float number = exponent == 0
                               ? std::ldexp(static_cast<float>(mantissa), -9)
                               : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      values[static_cast<size_t>(code)] = number;
      values[128 + static_cast<size_t>(code)] = -number;
    }
    const Array array(ScalarType::Float, values);
    const auto message = message_of(array, q);
    EXPECT_TRUE(array_of(ScalarType::Float, message, 256, q) == array);
    for (size_t code = 0; code < 0x7F; ++code) {
      EXPECT_EQ(message[4 + code], static_cast<std::byte>(code));
      EXPECT_EQ(message[4 + 128 + code], static_cast<std::byte>(0x80 | code));
    }
  });
}

// The error is half a step of the block's own maximum, and no element is cut off.
TEST(Quantise, LosesHalfAStepOfTheBlocksMaximumAtMost) {
  for_all([](const Quantisation& q) {
    const int64_t numel = 16 * q.block + 64;
    const Array values(ScalarType::Float, normal_values(numel, 3));
    const auto read = array_of(ScalarType::Float, message_of(values, q), numel, q);
    for (int64_t begin = 0; begin < numel; begin += q.block) {
      const auto end = std::min(numel, begin + q.block);
      float most = 0, most_read = 0;
      for (int64_t i = begin; i < end; ++i) {
        most = std::max(most, std::abs(values[static_cast<size_t>(i)]));
        most_read = std::max(most_read, std::abs(read[static_cast<size_t>(i)]));
      }
      EXPECT_LE(std::abs(most_read - most), most * 0x1p-17F) << "the scale's rounding alone";
      for (int64_t i = begin; i < end; ++i) {
        const float value = values[static_cast<size_t>(i)];
        const float step = most / greatest_code(q);
        const float half = q.format == WireFormat::fp8
                               ? std::max(std::abs(value) / 16, step * 0x1p-10F)
                               : step / 2;
        ASSERT_LE(std::abs(read[static_cast<size_t>(i)] - value), half * 1.001F) << value;
      }
    }
  });
}

TEST(Quantise, OfAQuantisedArrayIsTheSameMessage) {
  for_all([](const Quantisation& q) {
    for (const auto& numbers :
         {normal_values(5 * q.block + 67, 1), any_values(64 * q.block + 67, 2, 0),
          any_values(8 * q.block, 3, 2), extreme_values(q.block)}) {
      const Array values(ScalarType::Float, numbers);
      const auto message = message_of(values, q);
      const auto read = array_of(ScalarType::Float, message, values.numel(), q);
      ASSERT_TRUE(message_of(read, q) == message);
    }
  });
}

// An owner takes its bf16 weights from the message, too; the next message is the same.
TEST(Quantise, OfAQuantisedBf16ArrayIsTheSameMessage) {
  for_all([](const Quantisation& q) {
    const Array values(ScalarType::BFloat16, normal_values(64 * q.block + 67, 1, 0.02F));
    const auto message = message_of(values, q);
    const auto read = array_of(ScalarType::BFloat16, message, values.numel(), q);
    ASSERT_TRUE(message_of(read, q) == message);
  });
}

TEST(Quantise, KeepsZerosAndReadsFiniteBlocksAsFinite) {
  for_all([](const Quantisation& q) {
    const Array zeros(ScalarType::Float, std::vector<float>(static_cast<size_t>(q.block + 65)));
    EXPECT_TRUE(array_of(ScalarType::Float, message_of(zeros, q), zeros.numel(), q) == zeros);
    const Array extremes(ScalarType::Float, extreme_values(q.block));
    const auto read = array_of(ScalarType::Float, message_of(extremes, q), extremes.numel(), q);
    for (size_t i = 0; i < static_cast<size_t>(extremes.numel()); ++i)
      ASSERT_TRUE(std::isfinite(read[i])) << extremes[i];
    // Zero bytes are zeros in every format.
    const std::vector<std::byte> empty(static_cast<size_t>(wire_bytes(q, zeros.numel())));
    EXPECT_TRUE(array_of(ScalarType::Float, empty, zeros.numel(), q) == zeros);
  });
}

// Rounding such a NaN as a number would carry into its sign.
TEST(Quantise, ANanOfAllBitsStaysOne) {
  for_all([](const Quantisation& q) {
    const std::vector<std::byte> message(static_cast<size_t>(wire_bytes(q, q.block)),
                                         std::byte{0xFF});
    for (const auto dtype : kDtypes) {
      const auto read = array_of(dtype, message, q.block, q);
      for (int64_t i = 0; i < q.block; ++i)
        ASSERT_TRUE(std::isnan(read[static_cast<size_t>(i)])) << i;
    }
  });
}

TEST(Quantise, MakesTheWholeBlockNanOfAnyThatIsNotFinite) {
  for_all([](const Quantisation& q) {
    for (const float bad : {kInfinity, -kInfinity, std::nanf(""), -std::nanf("")}) {
      for (const auto dtype : kDtypes) {
        for (const int64_t at : {int64_t{0}, q.block - 1, q.block + 3, 2 * q.block + 1}) {
          auto numbers = normal_values(2 * q.block + 2, 1);
          numbers[static_cast<size_t>(at)] = bad;
          const Array values(dtype, numbers);
          const auto message = message_of(values, q);
          const auto read = array_of(dtype, message, values.numel(), q);
          std::vector<float> sum(numbers.size());
          dequantise_add(sum.data(), message.data(), values.numel(), q);
          for (int64_t i = 0; i < values.numel(); ++i) {
            ASSERT_EQ(std::isnan(read[static_cast<size_t>(i)]), i / q.block == at / q.block) << i;
            ASSERT_EQ(std::isnan(sum[static_cast<size_t>(i)]), i / q.block == at / q.block) << i;
          }
        }
      }
    }
  });
}

TEST(Quantise, ByPartsIsTheSameMessage) {
  for_all([](const Quantisation& q) {
    const Array values(ScalarType::BFloat16, normal_values(5 * q.block + 64, 1));
    const auto whole = message_of(values, q);
    std::vector<std::byte> parts(whole.size());
    auto read =
        Array(ScalarType::BFloat16, std::vector<float>(static_cast<size_t>(values.numel())));
    std::vector<float> sum(static_cast<size_t>(values.numel())), sum_of_parts = sum;
    dequantise_add(sum.data(), whole.data(), values.numel(), q);
    for (const BlockRange range : {BlockRange{4, 6}, BlockRange{0, 1}, BlockRange{1, 4}}) {
      quantise(parts.data(), values.data(), values.dtype(), values.numel(), q, range);
      dequantise(read.data(), values.dtype(), whole.data(), values.numel(), q, range);
      dequantise_add(sum_of_parts.data(), whole.data(), values.numel(), q, range);
    }
    EXPECT_TRUE(parts == whole);
    EXPECT_TRUE(read == array_of(ScalarType::BFloat16, whole, values.numel(), q));
    EXPECT_TRUE(sum == sum_of_parts);
  });
}

TEST(Feedback, EqualsThePlainLoop) {
  for_all([](const Quantisation& q) {
    for (const auto dtype : kDtypes) {
      const int64_t numel = 3 * q.block + 67;
      const auto error_bytes = wire_bytes(feedback_quantisation(q), numel);
      std::vector<std::byte> error(static_cast<size_t>(error_bytes)), plain_error = error;
      for (uint64_t step = 0; step < 4; ++step) {
        const Array values(
            dtype, step == 3 ? any_values(numel, step, 4) : normal_values(numel, step, 0.01F));
        std::vector<std::byte> fast(static_cast<size_t>(wire_bytes(q, numel))), plain = fast;
        quantise_with_feedback(fast.data(), error.data(), values.data(), dtype, numel, q, 0.8F);
        quantise_with_feedback(plain.data(), plain_error.data(), values.data(), dtype, numel, q,
                               0.8F, {}, Loops::plain);
        ASSERT_TRUE(fast == plain) << step;
        ASSERT_TRUE(error == plain_error) << step;
      }
    }
  });
}

// Computes the formula in plain fp32 over the whole array.
TEST(Feedback, AddsTheErrorAndKeepsItsMovingAverage) {
  for (const auto& q : all_quantisations()) {
    SCOPED_TRACE(describe(q));
    const auto of_error = feedback_quantisation(q);
    const int64_t numel = 2 * q.block;
    constexpr float kBeta = 0.75F;
    std::vector<std::byte> error(static_cast<size_t>(wire_bytes(of_error, numel)));
    for (uint64_t step = 0; step < 3; ++step) {
      const auto before = array_of(ScalarType::Float, error, numel, of_error);
      const auto numbers = normal_values(numel, step + 1);
      std::vector<float> wanted(numbers.size()), kept(numbers.size());
      for (size_t i = 0; i < numbers.size(); ++i) wanted[i] = numbers[i] + before[i];
      const auto expected = message_of(Array(ScalarType::Float, wanted), q);
      const auto said = array_of(ScalarType::Float, expected, numel, q);
      for (size_t i = 0; i < numbers.size(); ++i)
        kept[i] = kBeta * before[i] + (1 - kBeta) * (wanted[i] - said[i]);
      const auto next = message_of(Array(ScalarType::Float, kept), of_error);
      std::vector<std::byte> message(expected.size());
      quantise_with_feedback(message.data(), error.data(), numbers.data(), ScalarType::Float, numel,
                             q, kBeta);
      EXPECT_TRUE(message == expected) << step;
      // The plain sum above may be fused, so the kept errors agree to the last codes only.
      const auto is = array_of(ScalarType::Float, error, numel, of_error);
      const auto should = array_of(ScalarType::Float, next, numel, of_error);
      for (size_t i = 0; i < numbers.size(); ++i) ASSERT_NEAR(is[i], should[i], 1e-3F);
    }
  }
}

// The next messages bring what one message loses: the mean of many is that of the values.
TEST(Feedback, ComesCloserToAConstantThanQuantisingAlone) {
  const Quantisation q{WireFormat::int4, 64};
  const auto numbers = normal_values(64, 5);
  std::vector<double> alone(64), with(64);
  std::vector<std::byte> error(static_cast<size_t>(wire_bytes(feedback_quantisation(q), 64)));
  constexpr int kSteps = 400;
  const auto read =
      array_of(ScalarType::Float, message_of(Array(ScalarType::Float, numbers), q), 64, q);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::byte> message(static_cast<size_t>(wire_bytes(q, 64)));
    quantise_with_feedback(message.data(), error.data(), numbers.data(), ScalarType::Float, 64, q,
                           0);
    const auto said = array_of(ScalarType::Float, message, 64, q);
    for (size_t i = 0; i < 64; ++i) with[i] += said[i] / kSteps;
  }
  double lost_alone = 0, lost_with = 0;
  for (size_t i = 0; i < 64; ++i) {
    lost_alone += std::abs(read[i] - numbers[i]);
    lost_with += std::abs(with[i] - numbers[i]);
  }
  EXPECT_LT(lost_with, lost_alone / 5);
}

TEST(Feedback, SurvivesAnOverflow) {
  for_all([](const Quantisation& q) {
    const int64_t numel = 2 * q.block;
    std::vector<std::byte> message(static_cast<size_t>(wire_bytes(q, numel)));
    std::vector<std::byte> error(static_cast<size_t>(wire_bytes(feedback_quantisation(q), numel)));
    auto numbers = normal_values(numel, 1);
    const auto step = [&] {
      quantise_with_feedback(message.data(), error.data(), numbers.data(), ScalarType::Float, numel,
                             q, 0.8F);
    };
    step();
    const auto before = array_of(ScalarType::Float, error, numel, feedback_quantisation(q));
    numbers[5] = kInfinity;
    step();
    const auto said = array_of(ScalarType::Float, message, numel, q);
    const auto after = array_of(ScalarType::Float, error, numel, feedback_quantisation(q));
    for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
      ASSERT_EQ(std::isnan(said[i]), i < static_cast<size_t>(q.block));
      ASSERT_TRUE(std::isfinite(after[i]));
      if (i < static_cast<size_t>(q.block)) {
        ASSERT_EQ(after[i], before[i]);
      }
    }
  });
}

}  // namespace
}  // namespace zero::comm
