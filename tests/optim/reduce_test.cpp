#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "test_arrays.h"
#include "tests/support/instruction_sets.h"
#include "zero/base/error.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {
namespace {

/// The same random numbers, rounded to `dtype`, at any alignment.
struct Values {
  Values(int64_t numel, int64_t offset, c10::ScalarType dtype, uint32_t seed = 5)
      : wide(numel, offset), low(numel, offset) {
    data = dtype == c10::ScalarType::Float ? static_cast<void*>(wide.data()) : low.data();
    Numbers numbers(seed);
    for (int64_t i = 0; i < numel; ++i) narrow(data, dtype, i, numbers.next());
  }
  Array<float> wide;
  Array<uint16_t> low;
  void* data;
};

TEST(SquaredNorm, EqualsTheReferenceInBitsForEveryDtypeSizeAlignmentAndInstructionSet) {
  for (const auto dtype : dtypes()) {
    for (const int64_t numel : {0, 1, 7, 31, 32, 33, 1000, 16383, 16384, 16385, 70001}) {
      Values plain(numel, 0, dtype);
      const auto expected = squared_norm_reference(plain.data, dtype, numel);
      on_each_instruction_set([&](const char* instructions) {
        for (const int64_t offset : {0, 1, 3}) {
          Values values(numel, offset, dtype);
          const auto norm = squared_norm(values.data, dtype, numel);
          EXPECT_EQ(norm.sum, expected.sum)
              << instructions << " " << c10::toString(dtype) << " numel " << numel;
          EXPECT_TRUE(norm.finite);
        }
      });
    }
  }
}

TEST(SquaredNorm, IsAccurateToFp64) {
  const int64_t numel = 3000001;
  Values values(numel, 0, c10::ScalarType::Float);
  long double exact = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const long double value = values.wide.data()[i];
    exact += value * value;
  }
  const auto norm = squared_norm(values.data, c10::ScalarType::Float, numel);
  EXPECT_NEAR(static_cast<double>(static_cast<long double>(norm.sum) / exact), 1.0, 1e-14);
}

TEST(SquaredNorm, DoesNotDependOnThreadsEvenBeyondOneBatchOfBlocks) {
  const int64_t numel = 2100 * 16384 + 5;  // the blocks' sums are kept 2048 at a time
  const int threads = at::get_num_threads();
  Values values(numel, 1, c10::ScalarType::BFloat16);
  at::set_num_threads(1);
  const auto one = squared_norm(values.data, c10::ScalarType::BFloat16, numel);
  at::set_num_threads(3);
  const auto three = squared_norm(values.data, c10::ScalarType::BFloat16, numel);
  at::set_num_threads(threads);
  EXPECT_EQ(one.sum, three.sum);
  EXPECT_EQ(one.sum, squared_norm_reference(values.data, c10::ScalarType::BFloat16, numel).sum);
}

TEST(SquaredNorm, FindsAnInfinityOrNanAnywhereAndNothingElse) {
  for (const auto dtype : dtypes()) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      for (const int64_t at : {0, 5, 16384, 20000}) {
        Values values(20001, 0, dtype);
        narrow(values.data, dtype, at, bad);
        EXPECT_FALSE(squared_norm(values.data, dtype, 20001).finite) << at;
        EXPECT_FALSE(squared_norm_reference(values.data, dtype, 20001).finite) << at;
      }
    }
  }
  const std::vector<float> huge(20001, std::numeric_limits<float>::max());
  const auto norm = squared_norm(huge.data(), c10::ScalarType::Float, 20001);
  EXPECT_TRUE(norm.finite) << "squares that overflow fp32 are no overflow";
  EXPECT_NEAR(norm.sum / (20001 * std::pow(double{huge[0]}, 2)), 1.0, 1e-12);
}

TEST(SquaredNorm, RefusesOtherDtypes) {
  const double value = 1;
  EXPECT_THROW(squared_norm(&value, c10::ScalarType::Double, 1), ConfigError);
}

TEST(Accumulate, EqualsTheReferenceInBitsForEveryDtypeSizeAlignmentAndInstructionSet) {
  for (const auto dtype : dtypes()) {
    for (const int64_t numel : {0, 1, 7, 16, 17, 1000, 70001}) {
      Values source(numel, 3, dtype, 8);
      Values expected(numel, 0, c10::ScalarType::Float, 9);
      accumulate_reference(expected.wide.data(), source.data, dtype, numel);
      on_each_instruction_set([&](const char* instructions) {
        Values sum(numel, 1, c10::ScalarType::Float, 9);
        accumulate(sum.wide.data(), source.data, dtype, numel);
        for (int64_t i = 0; i < numel; ++i) {
          ASSERT_TRUE(same(sum.wide.data()[i], expected.wide.data()[i]))
              << instructions << " " << c10::toString(dtype) << " " << i << " of " << numel;
        }
        EXPECT_TRUE(sum.wide.guards_intact());
      });
    }
  }
}

}  // namespace
}  // namespace zero::optim
