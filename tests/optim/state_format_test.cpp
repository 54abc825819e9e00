// Optimizer states in 8 bits: codes, and updates of them, beside their plain references.
#include "zero/optim/state_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "test_arrays.h"
#include "tests/support/instruction_sets.h"
#include "zero/optim/narrow.h"

namespace zero::optim {
namespace {

using limits = std::numeric_limits<float>;
constexpr std::array kSigns{Sign::either, Sign::positive};

int64_t blocks_of(int64_t numel) { return (numel + kCodedBlock - 1) / kCodedBlock; }
std::vector<std::byte> zeros(int64_t numel) {
  return std::vector<std::byte>(static_cast<size_t>(blocks_of(numel) * kCodedBytes));
}
std::vector<float> numbers(int64_t numel, uint32_t seed, Sign sign, bool special) {
  Numbers source(seed, special);
  std::vector<float> values(static_cast<size_t>(numel));
  for (auto& value : values) {
    value = source.next();
    if (sign == Sign::positive) value *= value;
  }
  return values;
}
std::vector<std::byte> encoded(const std::vector<float>& values, Sign sign) {
  auto blocks = zeros(static_cast<int64_t>(values.size()));
  encode(values.data(), blocks.data(), static_cast<int64_t>(values.size()), sign);
  return blocks;
}
std::vector<float> decoded(const std::vector<std::byte>& blocks, size_t numel, Sign sign) {
  std::vector<float> values(numel);
  decode(blocks.data(), values.data(), static_cast<int64_t>(numel), sign);
  return values;
}

TEST(EightBitStates, HaveTheBitsOfTheReferenceOnEveryInstructionSet) {
  on_each_instruction_set([&](const char* name) {
    SCOPED_TRACE(name);
    for (const auto sign : kSigns) {
      for (const bool special : {false, true}) {
        for (const int64_t numel : {1, 15, 16, 63, 64, 100, 4096, 100'001}) {
          const auto values = numbers(numel, 5, sign, special);
          auto plain = zeros(numel);
          encode_reference(values.data(), plain.data(), numel, sign);
          const auto fast = encoded(values, sign);
          ASSERT_EQ(fast, plain) << numel;
          std::vector<float> expected(values.size());
          decode_reference(plain.data(), expected.data(), numel, sign);
          const auto got = decoded(fast, values.size(), sign);
          for (size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(same(got[i], expected[i])) << i;
        }
      }
    }
  });
}

TEST(EightBitStates, AllCodesAreNumbersInOrderAndComeBack) {
  on_each_instruction_set([&](const char* name) {
    SCOPED_TRACE(name);
    for (const auto sign : kSigns) {
      const int codes = sign == Sign::either ? 128 : 256;
      // A group's greatest number keeps its exponent.
      for (const int exponent : {24, 100, 127, 254}) {
        float last = -1;
        for (int code = 0; code < codes; ++code) {
          auto blocks = zeros(64);
          for (size_t group = 0; group < 4; ++group) {
            blocks[group] = static_cast<std::byte>(exponent);
            blocks[4 + 16 * group] = static_cast<std::byte>(codes - 1);
            blocks[4 + 16 * group + 1] = static_cast<std::byte>(code);
            if (sign == Sign::either && code > 0)
              blocks[4 + 16 * group + 2] = static_cast<std::byte>(code + 128);
          }
          const auto values = decoded(blocks, 64, sign);
          ASSERT_GT(values[1], last);
          ASSERT_TRUE(std::isfinite(values[0]));
          ASSERT_TRUE(values[1] == 0 || std::isnormal(values[1]));
          if (sign == Sign::either) {
            ASSERT_EQ(values[2], -values[1]);
          }
          last = values[1];
          ASSERT_EQ(encoded(values, sign), blocks) << code;
        }
      }
    }
  });
}

TEST(EightBitStates, AreNearByHalfACode) {
  for (const auto sign : kSigns) {
    const auto values = numbers(6400, 3, sign, false);
    const auto near = decoded(encoded(values, sign), values.size(), sign);
    for (size_t group = 0; group < values.size(); group += 16) {
      float greatest = 0;
      for (size_t i = group; i < group + 16; ++i)
        greatest = std::max(greatest, std::fabs(values[i]));
      // Mantissas of 4 bits, and the distance of codes at the lower end, where squares are not
      // rounded to zero.
      const float least = std::ldexp(1.04F * greatest, sign == Sign::either ? -6 : -13);
      for (size_t i = group; i < group + 16; ++i)
        EXPECT_LE(std::fabs(near[i] - values[i]), std::max(std::fabs(values[i]), least) / 32);
    }
  }
}

TEST(EightBitStates, ZerosDenormalsAndWhatIsNotFinite) {
  for (const auto sign : kSigns) {
    const std::vector<std::byte> nothing = zeros(64);
    EXPECT_EQ(encoded(std::vector<float>(64, 0.0F), sign), nothing);
    EXPECT_EQ(encoded(std::vector<float>(64, -0.0F), sign), nothing);
    EXPECT_EQ(encoded(std::vector<float>(64, limits::denorm_min()), sign), nothing);
    EXPECT_EQ(decoded(nothing, 64, sign), std::vector<float>(64, 0.0F));
    for (const float bad : {limits::infinity(), -limits::infinity(), limits::quiet_NaN()}) {
      std::vector<float> values(64, 1.0F);
      values[20] = bad;
      const auto back = decoded(encoded(values, sign), 64, sign);
      for (size_t i = 0; i < 64; ++i) {
        if (i >= 16 && i < 32) {
          EXPECT_TRUE(std::isnan(back[i]));
        } else {
          EXPECT_EQ(back[i], 1.0F);
        }
      }
    }
    const std::vector<float> greatest(64, limits::max());
    EXPECT_EQ(decoded(encoded(greatest, sign), 64, sign),
              std::vector<float>(64, std::ldexp(1.9375F, 127)));
    const std::vector<float> least(64, limits::min());
    const auto kept = decoded(encoded(least, sign), 64, sign);
    EXPECT_EQ(kept[0] > 0, sign == Sign::positive);
  }
  // Beside a great one a square is never zero.
  std::vector<float> squares(64, 1e-20F);
  squares[0] = 1;
  EXPECT_EQ(decoded(encoded(squares, Sign::positive), 64, Sign::positive)[1], 0x1p-18F);
}

// --- Updates

const std::vector<Optimizer>& optimizers() {
  static const std::vector<Optimizer> all{AdamW{.lr = 1e-3}, Sgd{.momentum = 0.9}, Sgd{},
                                          Adagrad{.lr = 1e-3}, Lion{.lr = 1e-3}};
  return all;
}

enum class Weights : uint8_t { fp32, copied, split, narrow };
constexpr std::array kWeights{Weights::fp32, Weights::copied, Weights::split, Weights::narrow};

struct Shard {
  Shard(const Optimizer& optimizer, int64_t numel, Weights weights, StateFormat format,
        bool special)
      : master(numbers(numel, 1, Sign::either, special)),
        gradient(numbers(numel, 2, Sign::either, special)),
        lower(master.size()),
        parameter(master.size()) {
    split(master.data(), parameter.data(), lower.data(), numel);
    operands.wide = {.numel = numel, .gradient = gradient.data()};
    if (weights == Weights::narrow) {
      operands.weights = parameter.data();
    } else if (weights == Weights::split) {
      operands.wide.lower = lower.data();
    } else {
      operands.wide.master = master.data();
    }
    if (weights == Weights::split || weights == Weights::copied) {
      operands.wide.parameter = parameter.data();
      operands.wide.parameter_dtype = c10::ScalarType::BFloat16;
    }
    operands.state_format = format;
    operands.key = rounding_key(3, 7);
    operands.first = 128;
    const auto signs = state_signs(optimizer);
    for (size_t i = 0; i < state_names(optimizer).size(); ++i) {
      const auto values = numbers(numel, 3 + static_cast<uint32_t>(i), signs[i], special);
      state[i].resize(static_cast<size_t>(blocks_of(numel) * 4 * kCodedBlock));
      if (format == StateFormat::eight_bit) {
        encode(values.data(), state[i].data(), numel, signs[i]);
      } else {
        split(values.data(), reinterpret_cast<uint16_t*>(state[i].data()), nullptr, numel);
      }
      operands.state[i] = state[i].data();
    }
  }
  void expect_same(const Shard& other, bool special) const {
    EXPECT_EQ(state, other.state);
    // NaN may be another NaN in fp32, and in the upper half of it.
    if (!special || operands.wide.lower == nullptr) {
      EXPECT_EQ(parameter, other.parameter);
    }
    if (special) return;
    EXPECT_EQ(master, other.master);
    EXPECT_EQ(lower, other.lower);
  }
  std::vector<float> master, gradient;
  std::vector<uint16_t> lower, parameter;
  std::array<std::vector<std::byte>, kMostStates> state;
  NarrowOperands operands;
};

TEST(EightBitUpdate, HasTheBitsOfTheReferenceOnEveryInstructionSet) {
  on_each_instruction_set([&](const char* name) {
    SCOPED_TRACE(name);
    for (const auto& optimizer : optimizers()) {
      for (const auto weights : kWeights) {
        for (const auto format : {StateFormat::bf16, StateFormat::eight_bit}) {
          for (const bool special : {false, true}) {
            for (const int64_t numel : {1, 100, 2049, 5000}) {
              Shard fast(optimizer, numel, weights, format, special);
              Shard plain(optimizer, numel, weights, format, special);
              update(optimizer, 7, 1e-3, 0.5, fast.operands);
              update_reference(optimizer, 7, 1e-3, 0.5, plain.operands);
              fast.expect_same(plain, special);
            }
          }
        }
      }
    }
  });
}

TEST(EightBitUpdate, IsTheSameInSlicesOfBlocks) {
  const Optimizer optimizer = AdamW{.lr = 1e-2};
  for (const auto weights : kWeights) {
    for (const int64_t cut : {64, 1024, 2112, 4032}) {
      const auto format = StateFormat::eight_bit;
      Shard whole(optimizer, 5000, weights, format, false);
      Shard parts(optimizer, 5000, weights, format, false);
      update(optimizer, 3, 1e-2, 1, whole.operands);
      auto first = parts.operands;
      first.wide.numel = cut;
      update(optimizer, 3, 1e-2, 1, first);
      auto second = parts.operands;
      second.wide.numel -= cut;
      second.first += cut;
      if (second.weights) second.weights += cut;
      if (second.wide.master) second.wide.master += cut;
      if (second.wide.lower) second.wide.lower += cut;
      if (second.wide.parameter)
        second.wide.parameter = static_cast<uint16_t*>(second.wide.parameter) + cut;
      second.wide.gradient = parts.gradient.data() + cut;
      for (auto& state : second.state)
        state = static_cast<std::byte*>(state) + state_bytes(format, cut);
      update(optimizer, 3, 1e-2, 1, second);
      whole.expect_same(parts, false);
    }
  }
}

// A step adds far less than the distance of two codes: rounding to nearest would lose it.
TEST(EightBitUpdate, SmallChangesAreRightOnAverage) {
  constexpr int64_t kCount = 64 * 1000;
  const Optimizer optimizer = Adagrad{.lr = 0};
  std::vector<float> weights(kCount, 0.0F);
  std::vector<float> gradient(kCount, 0.05F);
  auto blocks = encoded(std::vector<float>(kCount, 1.0F), Sign::positive);
  for (int step = 1; step <= 40; ++step) {
    NarrowOperands operands{
        .wide = {.numel = kCount, .master = weights.data(), .gradient = gradient.data()},
        .state = {blocks.data(), nullptr},
        .state_format = StateFormat::eight_bit,
        .key = rounding_key(0, step)};
    update(optimizer, step, 0, 1, operands);
  }
  double sum = 0;
  for (const float value : decoded(blocks, kCount, Sign::positive)) sum += value;
  EXPECT_NEAR(sum / kCount, 1 + 40 * 0.0025, 0.002);
}

// --- Beside the code of 8-bit optimizers (2110.02861)

// Dynamic tree quantisation: a decimal exponent and as many places as that leaves, means of even
// parts of [0.1, 1]; and 0 and 1.
std::vector<float> dynamic_codes(Sign sign) {
  std::vector<float> codes{0, 1};
  for (int exponent = 0; exponent < 7; ++exponent) {
    const int parts = 1 << (sign == Sign::either ? exponent : exponent + 1);
    for (int i = 0; i < parts; ++i) {
      const double mean = 0.1 + 0.9 * (i + 0.5) / parts;
      codes.push_back(static_cast<float>(mean * std::pow(10.0, exponent - 6)));
      if (sign == Sign::either) codes.push_back(-codes.back());
    }
  }
  std::sort(codes.begin(), codes.end());
  return codes;
}

// Rounds to the nearest code times the greatest magnitude of each `block`.
void round_dynamically(std::vector<float>& values, const std::vector<float>& codes, size_t block) {
  for (size_t first = 0; first < values.size(); first += block) {
    float greatest = 0;
    for (size_t i = first; i < first + block; ++i)
      greatest = std::max(greatest, std::fabs(values[i]));
    if (greatest == 0) continue;
    for (size_t i = first; i < first + block; ++i) {
      const float value = values[i] / greatest;
      auto at = std::lower_bound(codes.begin(), codes.end(), value);
      if (at == codes.end()) --at;
      if (at != codes.begin() && value - *(at - 1) < *at - value) --at;
      values[i] = *at * greatest;
    }
  }
}

// The distance of AdamW's update from that of fp32 moments, as a part of it, and the greatest one.
struct Away {
  double rms = 0;
  float greatest = 0;
};

// Takes neighbours whose gradients are of sizes over so many decades, which fall to a tenth
// halfway.
template <class Code>
Away away(double decades, const Code& code) {
  constexpr size_t kCount = 1024;
  constexpr int64_t kSteps = 3000;
  const Optimizer adam = AdamW{.eps = 1e-30, .weight_decay = 0};
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<float> size(kCount);
  for (auto& each : size) each = static_cast<float>(std::pow(10, -decades * uniform(generator)));
  std::vector<float> gradient(kCount), weights(kCount), exact(kCount);
  std::array<std::vector<float>, 2> moments{weights, weights};
  auto coded = moments;
  double error = 0;
  double whole = 0;
  Away result;
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < kCount; ++i)
      gradient[i] = size[i] * normal(generator) * (step > kSteps / 2 ? 0.1F : 1.0F);
    const auto update_of = [&](std::vector<float>& to, std::array<std::vector<float>, 2>& from) {
      std::fill(to.begin(), to.end(), 0.0F);
      update(adam, step, 1, 1,
             Operands{.numel = kCount,
                      .master = to.data(),
                      .state = {from[0].data(), from[1].data()},
                      .gradient = gradient.data()});
    };
    update_of(exact, moments);
    update_of(weights, coded);
    code(coded, step);
    if (step < 500) continue;
    for (size_t i = 0; i < kCount; ++i) {
      error += std::pow(weights[i] - exact[i], 2);
      whole += std::pow(exact[i], 2);
      result.greatest = std::max(result.greatest, std::fabs(weights[i]));
    }
  }
  result.rms = std::sqrt(error / whole);
  return result;
}

TEST(EightBitUpdate, StaysNearFp32WhateverTheNeighbours) {
  const auto ours = [](std::array<std::vector<float>, 2>& states, int64_t step) {
    for (size_t s = 0; s < 2; ++s) {
      const auto sign = s == 0 ? Sign::either : Sign::positive;
      auto& values = states[s];
      const auto count = static_cast<int64_t>(values.size());
      auto blocks = zeros(count);
      encode_reference(values.data(), blocks.data(), count, sign, rounding_key(0, step),
                       static_cast<int>(s) + 1, 0);
      decode(blocks.data(), values.data(), count, sign);
    }
  };
  const auto signed_codes = dynamic_codes(Sign::either);
  const auto positive_codes = dynamic_codes(Sign::positive);
  ASSERT_EQ(signed_codes.size(), 256);
  ASSERT_EQ(positive_codes.size(), 256);
  const auto theirs = [&](std::array<std::vector<float>, 2>& states, int64_t) {
    round_dynamically(states[0], signed_codes, 64);
    round_dynamically(states[1], positive_codes, 64);
  };
  for (const double decades : {0.0, 2.0, 4.0}) {
    const auto a = away(decades, ours);
    const auto b = away(decades, theirs);
    printf(
        "gradients of neighbours over %.0f decades: updates away by %.3f, the greatest %.3g; "
        "with the paper's code %.3g, %.3g\n",
        decades, a.rms, a.greatest, b.rms, b.greatest);
    EXPECT_LT(a.rms, decades > 2 ? 0.5 : 0.1);
    EXPECT_LT(a.greatest, 4);
    if (decades < 4) {
      EXPECT_LT(b.rms, 0.2);
    } else {
      EXPECT_GT(b.greatest, 1000) << "a square that became zero";
    }
  }
}

}  // namespace
}  // namespace zero::optim
