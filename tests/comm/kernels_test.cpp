// Tests the vector sums against the plain ones, with every instruction set.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/instruction_sets.h"
#include "zero/base/streaming.h"
#include "zero/comm/copy_kernels.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

struct Dtypes {
  c10::ScalarType input;
  c10::ScalarType output;
};

const Dtypes kAll[] = {
    {at::kFloat, at::kFloat},    {at::kDouble, at::kDouble}, {at::kBFloat16, at::kBFloat16},
    {at::kBFloat16, at::kFloat}, {at::kHalf, at::kHalf},     {at::kHalf, at::kFloat},
    {at::kFloat, at::kBFloat16}, {at::kFloat, at::kHalf},    {at::kInt, at::kInt},
    {at::kLong, at::kLong},      {at::kByte, at::kByte}};

// Random bits in floating point give every kind of number: huge, tiny, subnormal, infinite and NaN.
std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Sums into one output.
void sum_to(void* output, c10::ScalarType output_dtype, std::span<const void* const> inputs,
            c10::ScalarType input_dtype, int64_t numel, bool stream, int64_t block = kOneBlock) {
  sum({&output, 1}, output_dtype, inputs, input_dtype, numel, stream, block);
}

bool same(const std::byte* a, const std::byte* b, c10::ScalarType dtype) {
  const auto size = c10::elementSize(dtype);
  if (std::memcmp(a, b, size) == 0) return true;
  const auto is_nan = [&](const std::byte* value) {
    auto one = at::empty({1}, dtype);
    std::memcpy(one.data_ptr(), value, size);
    return at::isIntegralType(dtype, true) ? false : std::isnan(one.item<double>());
  };
  return is_nan(a) && is_nan(b);
}

TEST(Sum, EqualsThePlainLoopForAnyBitsTailsAndAlignments) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    for (const auto [input, output] : kAll) {
      const auto in_size = c10::elementSize(input);
      const auto out_size = c10::elementSize(output);
      for (const size_t arrays : {1, 2, 3, 4, 5}) {
        for (const int64_t numel :
             {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 1001}) {
          for (const size_t shift : {0, 1, 3}) {  // in elements, so that vectors are misaligned
            const auto n = static_cast<size_t>(numel);
            std::vector<std::vector<std::byte>> data;
            std::vector<const void*> inputs;
            for (size_t k = 0; k < arrays; ++k) {
              data.push_back(random_bytes((n + shift + k) * in_size, 1000 * k + n));
              inputs.push_back(data.back().data() + (shift + k) * in_size);
            }
            // A guard after the output shows writes beyond it.
            const std::vector<std::byte> before((n + shift + 8) * out_size, std::byte{0x5A});
            auto plain = before;
            sum_reference(plain.data() + shift * out_size, output, inputs, input, numel);
            for (const bool stream : {false, true}) {
              auto fast = before;
              sum_to(fast.data() + shift * out_size, output, inputs, input, numel, stream);
              for (size_t i = 0; i < n + shift + 8; ++i) {
                ASSERT_TRUE(same(fast.data() + i * out_size, plain.data() + i * out_size, output))
                    << input << " to " << output << ", element " << i << " of " << numel << ", "
                    << arrays << " arrays" << (stream ? ", streamed" : "");
              }
            }
          }
        }
      }
    }
  });
}

// Numbers whose sums depend on the order: all magnitudes within a factor of 2^20.
std::vector<float> spread_values(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (auto& value : values) {
    const auto mantissa = static_cast<float>(random() % 4096) - 2048;
    value = std::ldexp(mantissa, static_cast<int>(random() % 20) - 10);
  }
  return values;
}

TEST(Sum, AddsEachBlocksInputsFirstAndRoundsTheirSumsOnce) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    constexpr int64_t kNumel = 203;
    for (const auto [input, output] : kAll) {
      if (!at::isReducedFloatingType(input) && input != at::kFloat) continue;
      for (const int64_t arrays : {1, 2, 3, 4, 6, 7}) {
        std::vector<at::Tensor> data;
        std::vector<at::Tensor> widened;
        std::vector<const void*> inputs;
        for (int64_t k = 0; k < arrays; ++k) {
          auto values = spread_values(kNumel, static_cast<uint64_t>(k + 1));
          data.push_back(at::from_blob(values.data(), {kNumel}).to(input, false, true));
          widened.push_back(data.back().to(at::kFloat));
          inputs.push_back(data.back().const_data_ptr());
        }
        for (int64_t block = 1; block <= arrays + 1; ++block) {
          auto expected = at::empty({kNumel});
          for (int64_t i = 0; i < kNumel; ++i) {
            float total = 0;
            for (int64_t host = 0; host < arrays; host += block) {
              float partial = widened[static_cast<size_t>(host)].const_data_ptr<float>()[i];
              for (int64_t k = host + 1; k < std::min(host + block, arrays); ++k)
                partial += widened[static_cast<size_t>(k)].const_data_ptr<float>()[i];
              total = host == 0 ? partial : total + partial;
            }
            expected.mutable_data_ptr<float>()[i] = total;
          }
          expected = expected.to(output);
          auto plain = at::empty({kNumel}, output);
          sum_reference(plain.mutable_data_ptr(), output, inputs, input, kNumel, block);
          ASSERT_EQ(std::memcmp(plain.const_data_ptr(), expected.const_data_ptr(), plain.nbytes()),
                    0)
              << input << " to " << output << ", " << arrays << " in blocks of " << block;
          for (const bool stream : {false, true}) {
            auto fast = at::empty({kNumel}, output);
            sum_to(fast.mutable_data_ptr(), output, inputs, input, kNumel, stream, block);
            ASSERT_EQ(std::memcmp(fast.const_data_ptr(), expected.const_data_ptr(), fast.nbytes()),
                      0)
                << input << " to " << output << ", " << arrays << " in blocks of " << block;
          }
        }
      }
    }
  });
}

TEST(Sum, OfBlocksEqualsThePlainLoopForAnyBits) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    constexpr size_t kNumel = 203;
    for (const auto [input, output] : kAll) {
      const auto size = c10::elementSize(output);
      std::vector<std::vector<std::byte>> data;
      std::vector<const void*> inputs;
      for (size_t k = 0; k < 5; ++k)
        data.push_back(random_bytes(kNumel * c10::elementSize(input), k));
      for (const auto& array : data) inputs.push_back(array.data());
      for (const int64_t block : {1, 2, 3, 4, 5}) {
        std::vector<std::byte> plain(kNumel * size), fast(kNumel * size);
        sum_reference(plain.data(), output, inputs, input, kNumel, block);
        sum_to(fast.data(), output, inputs, input, kNumel, false, block);
        for (size_t i = 0; i < kNumel; ++i) {
          ASSERT_TRUE(same(fast.data() + i * size, plain.data() + i * size, output))
              << input << " to " << output << ", element " << i << ", blocks of " << block;
        }
      }
    }
  });
}

TEST(CopyBytes, CopiesExactlyWhatItIsAskedTo) {
  const auto source = random_bytes(kStreamedBytes + 300, 5);
  on_each_instruction_set([&](const char* instructions) {
    SCOPED_TRACE(instructions);
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4096}, kStreamedBytes - 1, kStreamedBytes,
          kStreamedBytes + 1, kStreamedBytes + 255}) {
      for (const int64_t to : {0, 1, 63, 64}) {
        for (const int64_t from : {0, 7}) {
          std::vector<std::byte> target(static_cast<size_t>(bytes + to + 100), std::byte{0x5A});
          auto expected = target;
          copy_bytes(target.data() + to, source.data() + from, bytes);
          std::copy_n(source.data() + from, bytes, expected.data() + to);
          ASSERT_TRUE(target == expected) << bytes << " bytes from " << from << " to " << to;
        }
      }
    }
  });
}

TEST(Sum, MayWriteOverAnyOfItsInputs) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    for (const auto [input, output] : kAll) {
      if (input != output) continue;
      const auto size = c10::elementSize(input);
      for (const size_t target : {0, 1, 2}) {
        for (const bool stream : {false, true}) {
          constexpr int64_t kNumel = 205;
          std::vector<std::vector<std::byte>> data;
          std::vector<const void*> inputs;
          for (size_t k = 0; k < 3; ++k) data.push_back(random_bytes(kNumel * size, k));
          for (const auto& array : data) inputs.push_back(array.data());
          std::vector<std::byte> expected(kNumel * size);
          sum_reference(expected.data(), output, inputs, input, kNumel);
          sum_to(data[target].data(), output, inputs, input, kNumel, stream);
          for (size_t i = 0; i < kNumel; ++i) {
            ASSERT_TRUE(same(data[target].data() + i * size, expected.data() + i * size, output))
                << input << " " << i;
          }
        }
      }
    }
  });
}

TEST(Sum, WritesToEveryOutput) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    for (const auto [input, output] : kAll) {
      if (input != output) continue;
      const auto size = c10::elementSize(input);
      for (const size_t arrays : {2, 3, 4}) {
        for (const size_t shift : {0, 1}) {  // one array's: then no store is aligned for all
          for (const bool stream : {false, true}) {
            constexpr int64_t kNumel = 333;
            std::vector<std::vector<std::byte>> data;
            std::vector<const void*> inputs;
            std::vector<void*> outputs;  // the inputs themselves, as in an all-reduce
            for (size_t k = 0; k < arrays; ++k) {
              data.push_back(random_bytes((kNumel + shift) * size, k));
              outputs.push_back(data.back().data() + (k == 1 ? shift : 0) * size);
              inputs.push_back(outputs.back());
            }
            std::vector<std::byte> expected(kNumel * size);
            sum_reference(expected.data(), output, inputs, input, kNumel);
            sum(outputs, output, inputs, input, kNumel, stream);
            for (const void* written : outputs) {
              for (size_t i = 0; i < kNumel; ++i) {
                ASSERT_TRUE(same(static_cast<const std::byte*>(written) + i * size,
                                 expected.data() + i * size, output))
                    << input << ", element " << i << ", " << arrays << " arrays";
              }
            }
          }
        }
      }
    }
  });
}

TEST(Sum, RoundsLowPrecisionOnceAtTheEnd) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    // 256 + 1 + 1 in bfloat16 arithmetic stays 256 at each step; added in fp32 it is 258.
    for (const auto dtype : {at::kBFloat16}) {
      std::vector<at::Tensor> tensors{at::full({40}, 256, dtype), at::full({40}, 1, dtype),
                                      at::full({40}, 1, dtype)};
      std::vector<const void*> inputs;
      for (const auto& tensor : tensors) inputs.push_back(tensor.const_data_ptr());
      auto output = at::empty({40}, dtype);
      sum_to(output.data_ptr(), dtype, inputs, dtype, 40, false);
      EXPECT_EQ(output[0].item<float>(), 258);
      EXPECT_EQ(output[39].item<float>(), 258);
    }
  });
}

TEST(Sum, AddsInArrayOrder) {
  on_each_instruction_set([](const char* instructions) {
    SCOPED_TRACE(instructions);
    // (1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1: another order gives another sum.
    auto big = at::full({40}, 1e8f);
    auto one = at::full({40}, 1.0f);
    auto minus = at::full({40}, -1e8f);
    auto output = at::empty({40});
    std::vector<const void*> inputs{big.const_data_ptr(), one.const_data_ptr(),
                                    minus.const_data_ptr()};
    sum_to(output.data_ptr(), at::kFloat, inputs, at::kFloat, 40, false);
    EXPECT_EQ(output[0].item<float>(), 0);
    EXPECT_EQ(output[39].item<float>(), 0);
    std::swap(inputs[1], inputs[2]);
    sum_to(output.data_ptr(), at::kFloat, inputs, at::kFloat, 40, false);
    EXPECT_EQ(output[0].item<float>(), 1);
    EXPECT_EQ(output[39].item<float>(), 1);
  });
}

TEST(Sum, IntegersWrapAround) {
  auto most = at::full({20}, std::numeric_limits<int32_t>::max(), at::kInt);
  auto one = at::full({20}, 1, at::kInt);
  auto output = at::empty({20}, at::kInt);
  const std::vector<const void*> inputs{most.const_data_ptr(), one.const_data_ptr()};
  sum_to(output.data_ptr(), at::kInt, inputs, at::kInt, 20, false);
  EXPECT_EQ(output[19].item<int32_t>(), std::numeric_limits<int32_t>::min());
}

}  // namespace
}  // namespace zero::comm
