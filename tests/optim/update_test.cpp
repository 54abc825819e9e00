#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/optim/test_arrays.h"
#include "tests/optim/test_shard.h"
#include "tests/support/instruction_sets.h"
#include "tests/support/thread_counts.h"
#include "zero/base/error.h"
#include "zero/base/streaming.h"
#include "zero/optim/halves.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {
namespace {

double rate(const Optimizer& optimizer) { return lr(optimizer); }

TEST(Update, EqualsTheReferenceInBitsForEveryDtypeSizeAlignmentAndInstructionSet) {
  for (const bool special : {false, true}) {
    for (const auto& [name, optimizer] : optimizers()) {
      for (const auto gradient : dtypes()) {
        for (const auto parameter : dtypes()) {
          for (const int64_t numel : {0, 1, 3, 7, 15, 16, 17, 33, 1023, 2050}) {
            const int64_t offset = numel % 5;
            Shard expected(optimizer, numel, offset, gradient, parameter, special);
            for (const int64_t step : {1, 2, 3}) {
              expected.new_gradient(static_cast<uint32_t>(10 + step), special);
              update_reference(optimizer, step, rate(optimizer), 0.37, expected.operands);
            }
            on_each_instruction_set([&](const char* instructions) {
              Shard fast(optimizer, numel, offset, gradient, parameter, special);
              for (const int64_t step : {1, 2, 3}) {
                fast.new_gradient(static_cast<uint32_t>(10 + step), special);
                update(optimizer, step, rate(optimizer), 0.37, fast.operands);
              }
              expect_same(fast, expected,
                          name + " " + instructions + " " + c10::toString(gradient) + " to " +
                              c10::toString(parameter) + " numel " + std::to_string(numel));
            });
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Update, CutsGradientsOffAtTheLimit) {
  for (const auto& [name, optimizer] : optimizers()) {
    Shard expected(optimizer, 1003, 2, c10::ScalarType::Float, c10::ScalarType::Float, false);
    auto clipped = expected.operands;
    std::vector<float> gradient(1003);
    for (size_t i = 0; i < gradient.size(); ++i) {
      const float scaled = static_cast<const float*>(clipped.gradient)[i] * 0.5F;
      gradient[i] = 2 * std::clamp(scaled, -0.125F, 0.125F);
    }
    clipped.gradient = gradient.data();
    update_reference(optimizer, 2, rate(optimizer), 0.5, clipped);
    Shard plain(optimizer, 1003, 2, c10::ScalarType::Float, c10::ScalarType::Float, false);
    plain.operands.gradient_limit = 0.125F;
    update_reference(optimizer, 2, rate(optimizer), 0.5, plain.operands);
    expect_same(plain, expected, name + " reference");
    on_each_instruction_set([&, &optimizer = optimizer, &name = name](const char* instructions) {
      Shard fast(optimizer, 1003, 2, c10::ScalarType::Float, c10::ScalarType::Float, false);
      fast.operands.gradient_limit = 0.125F;
      update(optimizer, 2, rate(optimizer), 0.5, fast.operands);
      expect_same(fast, expected, name + " " + instructions);
    });
  }
}

TEST(Update, DoesNotDependOnThreadsOrOnHowTheArrayIsCut) {
  const int64_t numel = 150001;
  const int threads = at::get_num_threads();
  for (const auto& [name, optimizer] : optimizers()) {
    const auto bf16 = c10::ScalarType::BFloat16;
    at::set_num_threads(1);
    Shard whole(optimizer, numel, 0, bf16, bf16, false);
    update(optimizer, 2, rate(optimizer), 0.5, whole.operands);

    at::set_num_threads(3);
    Shard threaded(optimizer, numel, 0, bf16, bf16, false);
    update(optimizer, 2, rate(optimizer), 0.5, threaded.operands);
    expect_same(threaded, whole, name + " on 3 threads");
    if (reach(optimizer) != Reach::element) continue;  // TwoSweeps has its own

    Shard cut(optimizer, numel, 0, bf16, bf16, false);
    int64_t piece = 1;
    for (int64_t begin = 0; begin < numel; begin += piece, piece = piece * 3 + 2) {
      Operands part = cut.operands;
      part.numel = std::min(piece, numel - begin);
      part.master += begin;
      for (auto*& state : part.state) state = state ? state + begin : nullptr;
      part.gradient = static_cast<const uint16_t*>(part.gradient) + begin;
      part.parameter = static_cast<uint16_t*>(part.parameter) + begin;
      update(optimizer, 2, rate(optimizer), 0.5, part);
    }
    expect_same(cut, whole, name + " in pieces");
  }
  at::set_num_threads(threads);
}

// Large arrays' parameters are written past the caches, if they are aligned.
TEST(Update, EqualsTheReferenceInBitsForArraysLargerThanTheCaches) {
  struct Case {
    Optimizer optimizer;
    c10::ScalarType parameter;
    int64_t offset;  // the parameter's is one more: 31 makes it 64 bytes, aligned
  };
  const auto bf16 = c10::ScalarType::BFloat16;
  const int64_t numel = kStreamedBytes / 2 + 77;
  for (const auto& [optimizer, parameter, offset] :
       {Case{AdamW{}, bf16, 31}, Case{AdamW{}, bf16, 0},
        Case{Sgd{.momentum = 0.9}, c10::ScalarType::Half, 31}}) {
    Shard expected(optimizer, numel, offset, bf16, parameter, false);
    update_reference(optimizer, 2, rate(optimizer), 0.37, expected.operands);
    on_each_instruction_set([&, &optimizer = optimizer, parameter = parameter,
                             offset = offset](const char* instructions) {
      Shard fast(optimizer, numel, offset, bf16, parameter, false);
      update(optimizer, 2, rate(optimizer), 0.37, fast.operands);
      expect_same(fast, expected, instructions + (" at " + std::to_string(offset)));
    });
  }
}

TEST(Update, NarrowsEveryFloatAsLibTorchDoes) {
  // Every 16-bit pattern as the upper half of an fp32 number, with several lower halves around the
  // rounding ties.
  const std::vector<uint32_t> lower{0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  const auto numel = static_cast<int64_t>(65536 * lower.size());
  const Optimizer still = Sgd{.lr = 0};
  std::vector<float> gradient(static_cast<size_t>(numel), 0.0F);
  std::vector<float> master(gradient.size());
  for (size_t i = 0; i < master.size(); ++i) {
    master[i] = std::bit_cast<float>(static_cast<uint32_t>(i / lower.size()) << 16 |
                                     lower[i % lower.size()]);
  }
  for (const auto dtype : {c10::ScalarType::BFloat16, c10::ScalarType::Half}) {
    on_each_instruction_set([&](const char* instructions) {
      auto weights = master;
      std::vector<uint16_t> parameter(master.size());
      update(still, 1, 0.0, 1.0,
             {.numel = numel,
              .master = weights.data(),
              .gradient = gradient.data(),
              .parameter = parameter.data(),
              .parameter_dtype = dtype});
      for (size_t i = 0; i < master.size(); ++i) {
        const uint16_t expected = dtype == c10::ScalarType::BFloat16 ? c10::BFloat16(master[i]).x
                                                                     : c10::Half(master[i]).x;
        if (std::isnan(master[i])) {
          ASSERT_TRUE(std::isnan(widen(&parameter[i], dtype, 0))) << instructions;
        } else {
          ASSERT_EQ(parameter[i], expected) << instructions << " " << master[i];
        }
      }
    });
  }
}

// Halves of the same master weights are updated to the same numbers, and round ties away from zero.
TEST(Update, OfSplitMasterWeightsIsThatOfWholeOnes) {
  const auto bf16 = c10::ScalarType::BFloat16;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const auto gradient : dtypes()) {
      for (const int64_t numel : {1, 15, 33, 2050, 40001}) {
        Shard whole(optimizer, numel, numel % 5, gradient, c10::ScalarType::Float, false);
        for (const int64_t step : {1, 2, 3})
          update_reference(optimizer, step, rate(optimizer), 0.37, whole.operands);
        const auto check = [&](const auto& update_with, const std::string& what) {
          Shard halves(optimizer, numel, numel % 5, gradient, bf16, false);
          Array<uint16_t> lower(numel, numel % 3);
          split(halves.operands.master, halves.parameter.data(), lower.data(), numel);
          auto operands = halves.operands;
          operands.master = nullptr;
          operands.lower = lower.data();
          for (const int64_t step : {1, 2, 3}) update_with(step, operands);
          join(halves.parameter.data(), lower.data(), halves.operands.master, numel);
          for (int64_t i = 0; i < numel; ++i) {
            const auto bits = std::bit_cast<uint32_t>(whole.operands.master[i]);
            ASSERT_TRUE(same(halves.operands.master[i], whole.operands.master[i]))
                << what << " " << i;
            ASSERT_EQ(halves.parameter.data()[i], (bits + 0x8000U) >> 16) << what << " " << i;
            for (const int s : {0, 1}) {
              if (!whole.operands.state[s]) continue;
              ASSERT_TRUE(same(halves.operands.state[s][i], whole.operands.state[s][i])) << what;
            }
          }
          EXPECT_TRUE(lower.guards_intact() && halves.parameter.guards_intact()) << what;
        };
        const auto what = name + " " + c10::toString(gradient) + " numel " + std::to_string(numel);
        check(
            [&, &optimizer = optimizer](int64_t step, const Operands& operands) {
              update_reference(optimizer, step, rate(optimizer), 0.37, operands);
            },
            what + " reference");
        on_each_instruction_set([&, &optimizer = optimizer](const char* instructions) {
          check(
              [&](int64_t step, const Operands& operands) {
                update(optimizer, step, rate(optimizer), 0.37, operands);
              },
              what + " " + instructions);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Halves, HoldEveryBitPatternAndTheNearestBf16Number) {
  const std::vector<uint32_t> lower{0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t rest : lower) {
      const auto bits = upper << 16 | rest;
      const auto value = std::bit_cast<float>(bits);
      const auto halves = split(value);
      ASSERT_EQ(std::bit_cast<uint32_t>(join(halves)), bits);
      // Every tie goes away from zero, all else as in LibTorch; but for NaN without the quiet bit.
      if (std::isnan(value)) {
        const bool quiet = rest == 0 && (upper & 0x40) != 0;
        const float narrow = widen(&halves.upper, c10::ScalarType::BFloat16, 0);
        ASSERT_TRUE(!quiet || std::isnan(narrow)) << upper;
      } else if (rest == 0x8000) {
        ASSERT_EQ(halves.upper, static_cast<uint16_t>(upper + 1));
      } else {
        ASSERT_EQ(halves.upper, c10::BFloat16(value).x) << value;
      }
      // A weight that something else writes keeps its lower half where there are numbers near it.
      const auto beside = lower_beside_written({static_cast<uint16_t>(upper), halves.lower});
      const float near = join({static_cast<uint16_t>(upper), beside});
      const float written = std::bit_cast<float>(upper << 16);
      if (std::isfinite(written)) {
        ASSERT_LE(std::abs(near - written), std::abs(written) / 256 + 1e-38F) << written;
        ASSERT_EQ(written == 0, near == 0) << written;
      } else {
        ASSERT_TRUE(same(near, written));
      }
    }
  }
}

TEST(Update, WidensEvery16BitGradientExactly) {
  for (const auto dtype : {c10::ScalarType::BFloat16, c10::ScalarType::Half}) {
    std::vector<uint16_t> gradient(65536);
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<uint16_t>(i);
    on_each_instruction_set([&](const char* instructions) {
      std::vector<float> sum(gradient.size(), -0.0F);
      accumulate(sum.data(), gradient.data(), dtype, 65536);
      for (size_t i = 0; i < gradient.size(); ++i) {
        ASSERT_TRUE(same(sum[i], widen(&gradient[i], dtype, 0))) << instructions << " " << i;
      }
    });
  }
}

/// Trains 5 tensors for 12 steps with LibTorch's optimizer and with ours, rates changing, and
/// compares the weights.
template <class Make>
void expect_like_libtorch(const Optimizer& ours, const Make& make) {
  torch::manual_seed(7);
  std::vector<torch::Tensor> theirs, masters, states[2];
  for (const int64_t numel : {1, 5, 64, 1000, 4097}) {
    theirs.push_back(torch::randn({numel}).requires_grad_());
    masters.push_back(theirs.back().detach().clone());
    for (auto& state : states) state.push_back(torch::zeros({numel}));
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer = make(theirs);
  for (int64_t step = 1; step <= 12; ++step) {
    const double lr = rate(ours) / static_cast<double>(step);
    for (auto& group : optimizer->param_groups()) group.options().set_lr(lr);
    for (size_t i = 0; i < theirs.size(); ++i) {
      const auto gradient = torch::randn_like(masters[i]);
      theirs[i].mutable_grad() = gradient;
      const auto scaled = gradient * 8;
      Operands operands{.numel = masters[i].numel(),
                        .master = masters[i].mutable_data_ptr<float>(),
                        .gradient = scaled.const_data_ptr<float>()};
      for (size_t s = 0; s < state_names(ours).size(); ++s) {
        operands.state[s] = states[s][i].mutable_data_ptr<float>();
      }
      update(ours, step, lr, 0.125, operands);
    }
    optimizer->step();
    for (size_t i = 0; i < theirs.size(); ++i) {
      ASSERT_TRUE(torch::allclose(masters[i], theirs[i], 1e-6, 2e-7))
          << "step " << step << ", largest difference "
          << (masters[i] - theirs[i]).abs().max().item<float>();
    }
  }
}

TEST(Update, AdamWIsLibTorchs) {
  expect_like_libtorch(
      AdamW{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-5, .weight_decay = 0.1},
      [](const auto& parameters) {
        return std::make_unique<torch::optim::AdamW>(parameters,
                                                     torch::optim::AdamWOptions(0.02)
                                                         .betas(std::make_tuple(0.8, 0.95))
                                                         .eps(1e-5)
                                                         .weight_decay(0.1));
      });
}

TEST(Update, AdamIsLibTorchs) {
  expect_like_libtorch(AdamW{.lr = 0.02,
                             .beta1 = 0.8,
                             .beta2 = 0.95,
                             .eps = 1e-5,
                             .weight_decay = 0.1,
                             .decoupled = false},
                       [](const auto& parameters) {
                         return std::make_unique<torch::optim::Adam>(
                             parameters, torch::optim::AdamOptions(0.02)
                                             .betas(std::make_tuple(0.8, 0.95))
                                             .eps(1e-5)
                                             .weight_decay(0.1));
                       });
}

TEST(Update, SgdIsLibTorchs) {
  expect_like_libtorch(Sgd{.lr = 0.1, .weight_decay = 0.05}, [](const auto& parameters) {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.1).weight_decay(0.05));
  });
  expect_like_libtorch(
      Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.05},
      [](const auto& parameters) {
        return std::make_unique<torch::optim::SGD>(
            parameters,
            torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.05));
      });
  expect_like_libtorch(
      Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
      [](const auto& parameters) {
        return std::make_unique<torch::optim::SGD>(
            parameters,
            torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.05).nesterov(true));
      });
}

TEST(Update, AdagradIsLibTorchs) {
  expect_like_libtorch(
      Adagrad{.lr = 0.1, .lr_decay = 0.01, .weight_decay = 0.05, .initial_accumulator_value = 0.5},
      [](const auto& parameters) {
        return std::make_unique<torch::optim::Adagrad>(parameters,
                                                       torch::optim::AdagradOptions(0.1)
                                                           .lr_decay(0.01)
                                                           .weight_decay(0.05)
                                                           .initial_accumulator_value(0.5));
      });
}

/// Weights and states of 20 steps in fp32 by the kernels, and in double by `step`, as formulas over
/// tensors; what differs is rounding.
void expect_like_formula(
    const Optimizer& ours, double tolerance,
    const std::function<void(int64_t step, torch::Tensor& p, std::vector<torch::Tensor>& states,
                             const torch::Tensor& g)>& step_in_double) {
  torch::manual_seed(11);
  const int64_t numel = 4097;
  auto p = torch::randn({numel}, torch::kDouble).mul_(0.1);
  auto master = p.to(torch::kFloat);
  p = master.to(torch::kDouble);
  auto exact = p.clone();
  std::vector<torch::Tensor> theirs, fast, doubles;
  for (size_t s = 0; s < state_names(ours).size(); ++s) {
    theirs.push_back(torch::zeros({numel}, torch::kDouble));
    doubles.push_back(torch::zeros({numel}, torch::kDouble));
    fast.push_back(torch::zeros({numel}, torch::kFloat));
  }
  for (int64_t step = 1; step <= 20; ++step) {
    const auto gradient = torch::randn({numel}, torch::kFloat);
    const auto wide = gradient.to(torch::kDouble);
    step_in_double(step, p, theirs, wide);
    Operands operands{.numel = numel,
                      .master = master.mutable_data_ptr<float>(),
                      .gradient = gradient.const_data_ptr<float>()};
    ExactOperands in_double{.numel = numel,
                            .weights = exact.mutable_data_ptr<double>(),
                            .gradient = wide.const_data_ptr<double>()};
    for (size_t s = 0; s < fast.size(); ++s) {
      operands.state[s] = fast[s].mutable_data_ptr<float>();
      in_double.state[s] = doubles[s].mutable_data_ptr<double>();
    }
    update(ours, step, lr(ours), 1, operands);
    update_exact(ours, step, lr(ours), in_double);
    ASSERT_TRUE(torch::allclose(exact, p, 1e-12, 1e-14)) << "step " << step;
    ASSERT_TRUE(torch::allclose(master.to(torch::kDouble), p, tolerance, tolerance))
        << "step " << step << ": " << (master - p).abs().max().item<double>();
  }
}

TEST(Update, LionIsThePapersProgram) {
  const Lion lion{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1};
  expect_like_formula(lion, 1e-6, [&](int64_t, auto& p, auto& states, const auto& g) {
    const auto mean = states[0] * lion.beta1 + g * (1 - lion.beta1);
    p = p * (1 - lion.lr * lion.weight_decay) - mean.sign() * lion.lr;
    states[0] = states[0] * lion.beta2 + g * (1 - lion.beta2);
  });
}

// The paper's recursion, with the sum of the weights as it grows; x is computed from y and z.
TEST(Update, ScheduleFreeAdamWIsThePapersAlgorithm) {
  for (const int64_t warmup : {0, 1, 6, 20, 100}) {
    SCOPED_TRACE(testing::Message() << "warm-up " << warmup);
    const ScheduleFreeAdamW o{
        .lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1, .warmup_steps = warmup};
    double sum = 0;
    expect_like_formula(o, 2e-6, [&](int64_t step, auto& y, auto& states, const auto& g) {
      auto& z = states[0];
      auto& v = states[1];
      if (step == 1) z = y.clone();
      const auto x = (y - z * (1 - o.beta1)) / o.beta1;
      const double rate =
          o.lr * (step < warmup ? static_cast<double>(step) / static_cast<double>(warmup) : 1);
      v = v * o.beta2 + g * g * (1 - o.beta2);
      const double correction = 1 - std::pow(o.beta2, static_cast<double>(step));
      z = z - (g / ((v / correction).sqrt() + o.eps) + y * o.weight_decay) * rate;
      sum += rate * rate;
      const double share = rate * rate / sum;
      y = z * (1 - o.beta1) + (x * (1 - share) + z * share) * o.beta1;
    });
  }
}

TEST(Evaluated, TheMeanIsComputedFromBothIterates) {
  EXPECT_EQ(evaluated(AdamW{}), std::nullopt);
  const double beta1 = 0.9, x = 0.3, z = 2;
  const double y = (1 - beta1) * z + beta1 * x;
  EXPECT_NEAR(y + *evaluated(ScheduleFreeAdamW{.beta1 = beta1}) * (z - y), x, 1e-15);
}

TEST(Update, LambIsDeepSpeeds) {
  for (const bool inside : {false, true}) {
    const Lamb lamb{.lr = 1e-2,
                    .beta1 = 0.8,
                    .eps = 1e-6,
                    .weight_decay = 0.1,
                    .min_coeff = 0.02,
                    .max_coeff = 0.03,
                    .bias_correction = !inside,
                    .eps_inside_sqrt = inside};
    bool below = false, between = false, above = false;  // the bounds are tried on both sides
    expect_like_formula(lamb, 2e-6, [&](int64_t step, auto& p, auto& states, const auto& g) {
      states[0] = states[0] * lamb.beta1 + g * (1 - lamb.beta1);
      states[1] = states[1] * lamb.beta2 + g * g * (1 - lamb.beta2);
      const auto root = inside ? (states[1] + lamb.eps).sqrt() : states[1].sqrt() + lamb.eps;
      const auto u = states[0] / root + p * lamb.weight_decay;
      const double ratio = p.norm().template item<double>() / u.norm().template item<double>();
      below = below || ratio < lamb.min_coeff;
      above = above || ratio > lamb.max_coeff;
      between = between || (ratio > lamb.min_coeff && ratio < lamb.max_coeff);
      double rate = lamb.lr;
      if (lamb.bias_correction) {
        rate *= std::sqrt(1 - std::pow(lamb.beta2, static_cast<double>(step))) /
                (1 - std::pow(lamb.beta1, static_cast<double>(step)));
      }
      p = p - u * (rate * std::clamp(ratio, lamb.min_coeff, lamb.max_coeff));
    });
    EXPECT_TRUE(below && between && above) << below << between << above;
  }
}

TEST(TwoSweeps, NormsDoNotDependOnHowAParameterIsCut) {
  const int64_t numel = 70001;
  const Optimizer lamb = Lamb{.lr = 1e-2, .weight_decay = 0.1};
  const auto bf16 = c10::ScalarType::BFloat16;
  Shard whole(lamb, numel, 0, bf16, bf16, false);
  Findings plain;
  first_sweep_reference(lamb, 2, 0.5, whole.operands, plain);
  on_each_instruction_set([&](const char* instructions) {
    for (const int64_t first_piece : {int64_t{64}, int64_t{640}, int64_t{70016}}) {
      Shard cut(lamb, numel, 0, bf16, bf16, false);
      Findings sum;
      int64_t piece = first_piece;
      for (int64_t begin = 0; begin < numel; begin += piece, piece *= 3) {
        Operands part = cut.operands;
        part.numel = std::min(piece, numel - begin);
        part.master += begin;
        for (auto& state : part.state) state += begin;
        part.gradient = static_cast<const uint16_t*>(part.gradient) + begin;
        part.parameter = static_cast<uint16_t*>(part.parameter) + begin;
        Findings found;
        first_sweep(lamb, 2, 0.5, part, found);
        sum.norms.add(found.norms);
      }
      EXPECT_EQ(sum.norms.weights.value(), plain.norms.weights.value()) << instructions;
      EXPECT_EQ(sum.norms.update.value(), plain.norms.update.value()) << instructions;
      EXPECT_EQ(ratio(lamb, sum.norms, numel), ratio(lamb, plain.norms, numel));
      expect_same(cut, whole, instructions);
    }
  });
}

TEST(ExactSum, IsExactInAnyOrderAndOverTheWholeRange) {
  ExactSum up, down;
  std::vector<double> values;
  for (int e = -298; e <= 262; e += 7) values.push_back(std::ldexp(1.0 + 0x1p-52 * (e & 1), e));
  values[0] = std::ldexp(1.0, -298);
  for (const double v : values) up.add(v);
  for (size_t i = values.size(); i-- > 0;) {
    ExactSum one;
    one.add(values[i]);
    down.add(one);
  }
  EXPECT_EQ(up.value(), down.value());
  long double sum = 0;
  for (const double v : values) sum += v;
  EXPECT_NEAR(static_cast<double>(static_cast<long double>(up.value()) / sum), 1, 1e-15);
  ExactSum many;
  for (int i = 0; i < 100000; ++i) many.add(0.1);
  EXPECT_NEAR(many.value(), 100000 * 0.1L, 1e-11);
  up.add(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(up.value()));
  EXPECT_EQ(ExactSum().value(), 0);
}

TEST(Muon, MakesMatricesOrthogonalAsThePlainLoopsDoOnAnyThreads) {
  torch::manual_seed(3);
  const int threads = at::get_num_threads();
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 9}, {29, 33}, {33, 7}, {64, 64}, {300, 140}}) {
    const auto given = torch::randn({rows, columns});
    auto plain = given.to(torch::kDouble).contiguous();
    orthogonalise_reference(plain.mutable_data_ptr<double>(), rows, columns, 5);
    std::vector<torch::Tensor> made;
    for (const int count : thread_counts()) {
      at::set_num_threads(count);
      made.push_back(given.clone());
      orthogonalise(made.back(), 5);
      EXPECT_TRUE(torch::equal(made.back(), made.front())) << count << " threads";
    }
    EXPECT_TRUE(torch::allclose(made.front().to(torch::kDouble), plain, 1e-4, 1e-5))
        << rows << " x " << columns;
    const auto singular = std::get<1>(torch::linalg_svd(plain, false, {}));
    EXPECT_LT(singular.max().item<double>(), 1.3);
    EXPECT_GT(singular.min().item<double>(), rows == columns ? 0 : 0.5);
  }
  at::set_num_threads(threads);
}

TEST(Muon, BothPassesAreTheFormula) {
  torch::manual_seed(5);
  const Muon muon{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.1};
  const int64_t rows = 40;
  const int64_t columns = 24;
  auto p = torch::randn({rows, columns}, torch::kDouble);
  auto master = p.to(torch::kFloat);
  auto momentum = torch::zeros_like(p);
  auto buffer = torch::zeros_like(master);
  for (int64_t step = 1; step <= 20; ++step) {
    const auto gradient = torch::randn({rows, columns});
    momentum = momentum.lerp(gradient.to(torch::kDouble), 1 - muon.momentum);
    auto o = gradient.to(torch::kDouble).lerp(momentum, muon.momentum).contiguous();
    orthogonalise_reference(o.mutable_data_ptr<double>(), rows, columns, muon.ns_steps);
    p = p * (1 - muon.lr * muon.weight_decay) - o * (muon.lr * std::sqrt(double{rows} / columns));

    auto direction = torch::zeros_like(master);
    Operands operands{.numel = rows * columns,
                      .master = master.mutable_data_ptr<float>(),
                      .gradient = gradient.const_data_ptr<float>()};
    operands.state[0] = buffer.mutable_data_ptr<float>();
    Findings findings{.direction = direction.mutable_data_ptr<float>()};
    first_sweep(muon, step, 1, operands, findings);
    orthogonalise(direction, muon.ns_steps);
    operands.gradient = direction.const_data_ptr<float>();
    second_sweep(muon, step, muon.lr, ratio(rows, columns), operands);
    ASSERT_TRUE(torch::allclose(master.to(torch::kDouble), p, 1e-4, 1e-4)) << step;
  }
}

TEST(WholeMatrices, PassesEqualTheReferenceInBits) {
  for (const Optimizer& optimizer :
       {Optimizer(Muon{.weight_decay = 0.1}), Optimizer(Apollo{.weight_decay = 0.1})}) {
    for (const auto gradient : dtypes()) {
      for (const int64_t numel : {1, 33, 2050}) {
        Shard expected(optimizer, numel, 3, gradient, c10::ScalarType::BFloat16, false);
        std::vector<float> plain(static_cast<size_t>(numel));
        Findings wanted{.direction = plain.data()};
        first_sweep_reference(optimizer, 1, 0.37, expected.operands, wanted);
        second_sweep_reference(optimizer, 1, 0.1, 1.5, expected.operands);
        on_each_instruction_set([&](const char* instructions) {
          Shard fast(optimizer, numel, 3, gradient, c10::ScalarType::BFloat16, false);
          std::vector<float> direction(static_cast<size_t>(numel));
          Findings found{.direction = direction.data()};
          first_sweep(optimizer, 1, 0.37, fast.operands, found);
          second_sweep(optimizer, 1, 0.1, 1.5, fast.operands);
          expect_same(fast, expected, instructions);
          EXPECT_EQ(direction, plain) << instructions;
        });
      }
    }
  }
}

TEST(Update, RefusesADtypeThatARangeMayNotHave) {
  const Optimizer optimizer = Sgd{};
  EXPECT_THROW(update(optimizer, 1, 0.1, 1.0, {.gradient_dtype = c10::ScalarType::Double}),
               ConfigError);
  float parameter = 0;
  EXPECT_THROW(update(optimizer, 1, 0.1, 1.0,
                      {.parameter = &parameter, .parameter_dtype = c10::ScalarType::Float}),
               ConfigError);
}

TEST(Check, NamesTheHyperParameterThatCannotBeUsed) {
  using testing::HasSubstr;
  using testing::ThrowsMessage;
  for (const auto& [name, optimizer] : optimizers()) EXPECT_NO_THROW(check(optimizer)) << name;
  EXPECT_THAT([] { check(AdamW{.lr = -1}); }, ThrowsMessage<ConfigError>(HasSubstr("lr is -1")));
  EXPECT_THAT([] { check(AdamW{.beta1 = 1}); }, ThrowsMessage<ConfigError>(HasSubstr("beta1")));
  EXPECT_THAT([] { check(AdamW{.beta2 = -0.1}); }, ThrowsMessage<ConfigError>(HasSubstr("beta2")));
  EXPECT_THAT([] { check(AdamW{.eps = -1}); }, ThrowsMessage<ConfigError>(HasSubstr("eps")));
  EXPECT_THAT([] { check(Sgd{.weight_decay = NAN}); },
              ThrowsMessage<ConfigError>(HasSubstr("weight_decay")));
  EXPECT_THAT([] { check(Lamb{.min_coeff = 2, .max_coeff = 1}); },
              ThrowsMessage<ConfigError>(HasSubstr("min_coeff")));
  EXPECT_THAT([] { check(Muon{.ns_steps = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("ns_steps")));
  EXPECT_THAT([] { check(Muon{.adam_lr = -1}); },
              ThrowsMessage<ConfigError>(HasSubstr("adam_lr is -1")));
  EXPECT_THAT([] { check(Muon{.beta2 = 1}); }, ThrowsMessage<ConfigError>(HasSubstr("beta2 is 1")));
  EXPECT_THAT([] { check(Apollo{.rank = 0}); }, ThrowsMessage<ConfigError>(HasSubstr("rank is 0")));
  EXPECT_THAT([] { check(Apollo{.norm_growth = 0.5}); },
              ThrowsMessage<ConfigError>(HasSubstr("norm_growth is 0.5")));
  EXPECT_THAT([] { check(ScheduleFreeAdamW{.beta1 = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("beta1 is 0, but it must be above 0")));
  EXPECT_THAT([] { check(ScheduleFreeAdamW{.warmup_steps = -1}); },
              ThrowsMessage<ConfigError>(HasSubstr("warmup_steps is -1")));
  EXPECT_THAT([] { check(Sgd{.nesterov = true}); },
              ThrowsMessage<ConfigError>(HasSubstr("momentum")));
}

TEST(StateNames, FollowTheOptimizer) {
  EXPECT_THAT(state_names(AdamW{}), testing::ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(state_names(Sgd{.momentum = 0.9}), testing::ElementsAre("momentum_buffer"));
  EXPECT_THAT(state_names(Sgd{}), testing::IsEmpty());
  EXPECT_THAT(state_names(Adagrad{}), testing::ElementsAre("sum"));
  EXPECT_THAT(state_names(Lion{}), testing::ElementsAre("exp_avg"));
  EXPECT_THAT(state_names(Lamb{}), testing::ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(state_names(Muon{}), testing::ElementsAre("momentum_buffer"));
  EXPECT_THAT(state_names(ScheduleFreeAdamW{}), testing::ElementsAre("z", "exp_avg_sq"));
  EXPECT_THAT(state_names(Apollo{}), testing::IsEmpty());
}

}  // namespace
}  // namespace zero::optim
