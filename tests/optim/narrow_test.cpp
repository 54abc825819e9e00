// Updates of weights and states in bf16 beside their plain reference.
#include "zero/optim/narrow.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "test_arrays.h"
#include "tests/support/instruction_sets.h"

namespace zero::optim {
namespace {

constexpr auto kBf16 = c10::ScalarType::BFloat16;

struct Shard {
  Shard(const Optimizer& optimizer, int64_t numel, c10::ScalarType states, bool special)
      : weights(static_cast<size_t>(numel)), gradient(weights.size()) {
    const auto fill = [&](void* to, c10::ScalarType dtype, uint32_t seed, bool squares) {
      Numbers numbers(seed, special);
      for (int64_t i = 0; i < numel; ++i) {
        const float value = numbers.next();
        narrow(to, dtype, i, squares ? value * value : value);
      }
    };
    fill(weights.data(), kBf16, 1, false);
    fill(gradient.data(), kBf16, 2, false);
    operands = {.wide = {.numel = numel, .gradient = gradient.data(), .gradient_dtype = kBf16},
                .weights = weights.data(),
                .state_format = states == kBf16 ? StateFormat::bf16 : StateFormat::fp32,
                .key = rounding_key(3, 7),
                .first = 64};
    const auto names = state_names(optimizer);
    for (size_t i = 0; i < names.size(); ++i) {
      state[i].resize(2 * weights.size());
      const bool squares = names[i] == "exp_avg_sq" || names[i] == "sum";
      fill(state[i].data(), states, 3 + static_cast<uint32_t>(i), squares);
      operands.state[i] = state[i].data();
    }
  }
  std::vector<uint16_t> weights, gradient;
  std::array<std::vector<uint16_t>, 2> state;  // fp32 ones take two places
  NarrowOperands operands;
};

const std::vector<Optimizer>& optimizers() {
  static const std::vector<Optimizer> all{AdamW{.lr = 1e-3}, Sgd{.momentum = 0.9}, Sgd{},
                                          Adagrad{.lr = 1e-3}, Lion{.lr = 1e-3}};
  return all;
}

// NaN may be another NaN in fp32.
void expect_same(const Shard& a, const Shard& b, bool special) {
  EXPECT_EQ(a.weights, b.weights);
  if (special && a.operands.state_format != StateFormat::bf16) return;
  EXPECT_EQ(a.state, b.state);
}

TEST(NarrowUpdate, HasTheBitsOfTheReferenceOnEveryInstructionSet) {
  on_each_instruction_set([&](const char*) {
    for (const auto& optimizer : optimizers()) {
      for (const auto states : {c10::ScalarType::Float, kBf16}) {
        for (const bool special : {false, true}) {
          for (const int64_t numel : {1, 15, 16, 1000, 2047, 2049, 70000}) {
            Shard fast(optimizer, numel, states, special);
            Shard plain(optimizer, numel, states, special);
            update(optimizer, 7, 1e-3, 0.5, fast.operands);
            update_reference(optimizer, 7, 1e-3, 0.5, plain.operands);
            expect_same(fast, plain, special);
          }
        }
      }
    }
  });
}

// The numbers of elements decide, not where a slice begins.
TEST(NarrowUpdate, IsTheSameInSlices) {
  const Optimizer optimizer = AdamW{.lr = 1e-2};
  for (const int64_t cut : {1, 17, 1024, 2048, 4000}) {
    Shard whole(optimizer, 5000, kBf16, false);
    Shard parts(optimizer, 5000, kBf16, false);
    update(optimizer, 3, 1e-2, 1, whole.operands);
    auto first = parts.operands;
    first.wide.numel = cut;
    auto second = parts.operands;
    second.wide.numel -= cut;
    second.first += cut;
    second.weights += cut;
    for (auto& state : second.state) state = static_cast<uint16_t*>(state) + cut;
    second.wide.gradient = static_cast<const uint16_t*>(second.wide.gradient) + cut;
    update(optimizer, 3, 1e-2, 1, first);
    update(optimizer, 3, 1e-2, 1, second);
    expect_same(whole, parts, false);
  }
}

TEST(NarrowUpdate, IsTheSameWhereNumbersPassFourThousandMillion) {
  const Optimizer optimizer = Sgd{.lr = 1e-2};
  for (const int64_t before : {1, 700, 2048, 3000}) {
    Shard fast(optimizer, 5000, kBf16, false);
    Shard plain(optimizer, 5000, kBf16, false);
    fast.operands.first = plain.operands.first = (int64_t{1} << 32) - before;
    update(optimizer, 3, 1e-2, 1, fast.operands);
    update_reference(optimizer, 3, 1e-2, 1, plain.operands);
    expect_same(fast, plain, false);
  }
}

TEST(StochasticRounding, IsRightOnAverageAndIndependentOfItsNeighbours) {
  // A quarter of the way from 1 to the next bf16 number, 1 + 1/128.
  const float value = 1 + 0.25F / 128;
  constexpr int64_t kCount = 200'000;
  for (const int array : {0, 1, 2}) {
    for (const int64_t step : {1, 2, 1000}) {
      int64_t up = 0;
      int64_t both = 0;
      bool last = false;
      for (int64_t i = 0; i < kCount; ++i) {
        const bool is_up = round_stochastic(value, rounding_key(5, step), array, i) == 0x3F81;
        up += is_up ? 1 : 0;
        both += is_up && last ? 1 : 0;
        last = is_up;
      }
      // Five standard deviations.
      EXPECT_NEAR(static_cast<double>(up) / kCount, 0.25, 0.005);
      EXPECT_NEAR(static_cast<double>(both) / kCount, 0.0625, 0.003);
    }
  }
}

TEST(StochasticRounding, KeepsWhatBf16Has) {
  using limits = std::numeric_limits<float>;
  for (const float value : {0.0F, -0.0F, 1.0F, -1.5F, 3.0e38F, limits::infinity(),
                            -limits::infinity(), limits::denorm_min() * 65536}) {
    const float kept = c10::BFloat16(value);
    for (int64_t i = 0; i < 100; ++i) {
      const auto rounded = round_stochastic(kept, 9, 0, i);
      EXPECT_EQ(rounded, std::bit_cast<uint32_t>(kept) >> 16) << value;
    }
  }
  for (int64_t i = 0; i < 100; ++i) {
    const auto quiet = std::bit_cast<float>(0x7F800001U);
    EXPECT_EQ(round_stochastic(quiet, 9, 0, i), 0x7FC0);
  }
}

}  // namespace
}  // namespace zero::optim
