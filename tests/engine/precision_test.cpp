// Training in fp16 with a scaled loss, and what else of numbers' formats the engine has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/optim/loss_scale.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::AllOf;
using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Config half(int stage, int64_t accumulate = 1) {
  auto c = config(stage, false, accumulate);
  c.fp16 = true;
  c.loss_scaling = {.initial_power = 10, .window = 4, .hysteresis = 1};
  return c;
}

// The steps of a run as it tells them, and its end.
struct Trajectory {
  std::vector<double> scales;
  std::vector<bool> updated;
  std::vector<at::Tensor> states;
};

// Steps 3 and 6 overflow on the last rank alone, whatever the scale.
Trajectory run(const Config& c, int ranks, int64_t steps = 14) {
  Trajectory result;
  run_as_threads(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    Trajectory mine;
    int64_t micro_batch = 0;
    for (int64_t step = 0; step < steps; ++step) {
      StepResult of_step;
      for (int64_t k = 0; k < c.gradient_accumulation_steps; ++k) {
        auto loss = loss_of(*net, group->rank(), micro_batch++);
        if ((step == 3 || step == 6) && group->rank() == ranks - 1) loss = loss * kInfinity;
        engine.backward(loss);
        of_step = engine.step();
      }
      mine.scales.push_back(of_step.loss_scale);
      mine.updated.push_back(of_step.updated);
      EXPECT_EQ(engine.loss_scale(), of_step.next_loss_scale);
    }
    EXPECT_EQ(engine.steps(), std::count(mine.updated.begin(), mine.updated.end(), true));
    for (const auto& name : engine.parameter_names()) {
      mine.states.push_back(engine.parameter(name).clone());
      mine.states.push_back(engine.optimizer_state(name, "exp_avg").clone());
      mine.states.push_back(engine.optimizer_state(name, "exp_avg_sq").clone());
    }
    if (group->rank() == 0) result = std::move(mine);
  });
  return result;
}

void expect_same(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.scales, b.scales);
  EXPECT_EQ(a.updated, b.updated);
  expect_equal(a.states, b.states);
}

// A scale so great that the first steps overflow, and a window so short that later ones do again.
Config overflowing(Config c) {
  c.loss_scaling = {.initial_power = 24, .window = 2, .hysteresis = 2};
  return c;
}

TEST(Fp16, ScalesFollowTheRuleAndAreTheSameAtEveryStageAndTier) {
  const TemporaryFolder folder;
  for (int ranks = 1; ranks <= 2; ++ranks) {
    const auto expected = run(overflowing(half(0)), ranks, 40);
    LossScale rule(overflowing(half(0)).loss_scaling);
    for (size_t i = 0; i < expected.scales.size(); ++i) {
      EXPECT_EQ(expected.scales[i], rule.value()) << "step " << i;
      rule.update(!expected.updated[i]);
    }
    EXPECT_FALSE(expected.updated.front());
    EXPECT_GT(std::count(expected.updated.begin(), expected.updated.end(), true), 15);
    EXPECT_GT(std::count(expected.updated.begin(), expected.updated.end(), false), 8);
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(testing::Message() << "ranks " << ranks << ", stage " << stage);
      const auto c = overflowing(half(stage));
      expect_same(run(c, ranks, 40), expected);
      expect_same(run(optimizer_on_host(c), ranks, 40), expected);
      expect_same(run(on_disk(c, folder), ranks, 40), expected);
      if (stage == 3) {
        expect_same(run(all_on_host(c), ranks, 40), expected);
        expect_same(run(all_on_disk(c, folder), ranks, 40), expected);
        auto matched = c;
        matched.one_sided_gather = false;
        matched.max_live_parameters = 0;
        expect_same(run(matched, ranks, 40), expected);
      }
      if (stage >= 2) {
        auto gradients = on_disk(c, folder);
        gradients.offload_optimizer.gradients = true;
        expect_same(run(gradients, ranks, 40), expected);
      }
    }
  }
}

TEST(Fp16, ADelayedUpdateIsThatOfALastStepThatDidNotOverflow) {
  const TemporaryFolder folder;
  const auto delayed = [](Config c) {
    c.offload_optimizer.delayed_update_after = 3;
    return c;
  };
  const auto expected = run(delayed(overflowing(half(0))), 2, 30);
  LossScale rule(overflowing(half(0)).loss_scaling);
  for (size_t i = 0; i < expected.scales.size(); ++i) {
    EXPECT_EQ(expected.scales[i], rule.value()) << "step " << i;
    rule.update(!expected.updated[i]);
  }
  for (int stage = 0; stage <= 3; ++stage) {
    const auto c = delayed(overflowing(half(stage)));
    expect_same(run(c, 2, 30), expected);
    expect_same(run(optimizer_on_host(c), 2, 30), expected);
    expect_same(run(stage == 3 ? all_on_disk(c, folder) : on_disk(c, folder), 2, 30), expected);
  }
}

// Updates that backward has made are taken back.
TEST(Fp16, InBackwardStepsThatOverflowAreTakenBack) {
  const TemporaryFolder folder;
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto expected = run(overflowing(half(0)), ranks, 40);
    for (int stage = 2; stage <= 3; ++stage) {
      SCOPED_TRACE(testing::Message() << "ranks " << ranks << ", stage " << stage);
      auto c = in_backward(on_disk(overflowing(half(stage)), folder));
      expect_same(run(c, ranks, 40), expected);
      c.offload_optimizer.pipeline_read = c.offload_optimizer.pipeline_write = false;
      expect_same(run(c, ranks, 40), expected);
      if (stage < 3) continue;
      expect_same(run(in_backward(all_on_disk(overflowing(half(3)), folder)), ranks, 40), expected);
      expect_same(run(in_backward(all_on_disk(overflowing(half(3)), folder, 700)), ranks, 40),
                  expected);
    }
  }
}

TEST(Fp16, ASkippedStepChangesNothing) {
  const TemporaryFolder folder;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool on_a_disk : {false, true}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2},
                      on_a_disk ? on_disk(half(stage), folder) : half(stage), group);
        train(engine, *net, 2);
        const auto states = [&] {
          std::vector<at::Tensor> now;
          for (const auto& name : engine.parameter_names()) {
            now.push_back(engine.parameter(name).clone());
            now.push_back(engine.optimizer_state(name, "exp_avg").clone());
            now.push_back(engine.optimizer_state(name, "exp_avg_sq").clone());
          }
          return now;
        };
        const auto before = states();
        const auto loss = loss_of(*net, group->rank(), 2);
        engine.backward(group->rank() == 1 ? loss * kInfinity : loss);
        const auto result = engine.step();
        EXPECT_TRUE(result.boundary);
        EXPECT_FALSE(result.updated);
        EXPECT_EQ(result.step, 2);
        EXPECT_EQ(result.loss_scale, 1024);
        EXPECT_EQ(result.next_loss_scale, 512);
        EXPECT_EQ(engine.steps(), 2);
        expect_equal(states(), before);
      });
    }
  }
}

TEST(Fp16, NormsAndGradientsAreUnscaled) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int64_t k : {1, 2}) {
      run_as_threads(2, [&](auto group) {
        const auto look = [&](const Config& c) {
          auto net = std::make_shared<Net>();
          Engine engine(net, Sgd{.lr = 0.1}, c, group);
          for (int64_t i = 0; i < k; ++i) {
            const auto loss = loss_of(*net, group->rank(), i);
            const auto value = loss.template item<float>();
            engine.backward(loss);
            EXPECT_EQ(loss.template item<float>(), value);
            if (i + 1 < k) engine.step();
          }
          auto gradient = engine.gradient("b.weight");
          const auto norm = engine.step().grad_norm;
          return std::pair(gradient, norm);
        };
        auto scaled = half(stage, k);
        scaled.gradient_clipping = 0.5;
        auto whole = config(stage, false, k);
        const auto [gradient, norm] = look(scaled);
        const auto [expected, expected_norm] = look(whole);
        EXPECT_LT((gradient - expected).norm().template item<double>(),
                  5e-3 * expected.norm().template item<double>());
        EXPECT_NEAR(norm, expected_norm, 1e-2 * expected_norm);
        scaled.loss_scaling.initial_power = 4;
        EXPECT_NEAR(look(scaled).second, norm, 1e-2 * norm) << "whatever the scale";
      });
    }
  }
}

TEST(Fp16, AGradientThatIsSetIsTheMean) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, half(stage), group);
      engine.backward(loss_of(*net, group->rank(), 0));
      const auto wanted = torch::linspace(-1, 1, 33);
      engine.set_gradient("a.bias", wanted);
      EXPECT_TRUE(torch::allclose(engine.gradient("a.bias"), wanted, 1e-3, 1e-4));
      EXPECT_TRUE(engine.step().updated);
    });
  }
}

// Each rank's gradient is near fp16's greatest number, and so is their mean; the sum is beyond it.
TEST(Fp16, ASumBeyondItsRangeDoesNotOverflowWhereTheMeanIsWithin) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      run_as_threads(ranks, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto c = half(stage);
        c.loss_scaling = {.fixed = 1};
        Engine engine(net, Sgd{.lr = 1}, c, group);
        engine.backward((net->a->bias.to(at::kFloat) * 60000).sum());
        EXPECT_TRUE(torch::allclose(engine.gradient("a.bias"), torch::full({33}, 60000.0F), 1e-3));
        const auto result = engine.step();
        EXPECT_TRUE(result.updated) << "stage " << stage << ", ranks " << ranks;
        EXPECT_NEAR(result.grad_norm, 60000 * std::sqrt(33), 200);
      });
    }
  }
}

TEST(Fp16, AtTheFloorAnOverflowIsAnErrorOnAllRanks) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = half(stage);
      c.loss_scaling = {.initial_power = 1, .hysteresis = 1, .minimum = 1};
      Engine engine(net, AdamW{}, c, group);
      const auto before = weights(engine);
      const auto overflow = [&] {
        const auto loss = loss_of(*net, group->rank(), 0);
        engine.backward(group->rank() == 0 ? loss * kInfinity : loss);
        return engine.step();
      };
      EXPECT_EQ(overflow().next_loss_scale, 1);
      EXPECT_THAT(message_of<Error>(overflow),
                  AllOf(HasSubstr("at its minimum already (fp16.min_loss_scale, 1)"),
                        HasSubstr("bf16.enabled")));
      expect_equal(weights(engine), before);
      EXPECT_EQ(engine.steps(), 0);
      train(engine, *net, 1);
      EXPECT_EQ(engine.steps(), 1) << "it goes on where the user does";
    });
  }
}

TEST(Fp16, AFixedScaleStaysAndStillSkips) {
  auto c = half(2);
  c.loss_scaling = {.fixed = 256};
  const auto result = run(c, 2, 8);
  EXPECT_THAT(result.scales, testing::Each(256));
  EXPECT_EQ(result.updated, (std::vector<bool>{true, true, true, false, true, true, false, true}));
}

TEST(Fp16, TheScaleIsSavedAndResumed) {
  const TemporaryFolder folder;
  for (int stage = 0; stage <= 3; stage += 3) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, half(stage), group);
      const auto steps = [&](int64_t first, int64_t count) {
        std::vector<double> scales;
        for (int64_t i = first; i < first + count; ++i) {
          engine.backward(loss_of(*net, group->rank(), i) * (i % 6 == 5 ? kInfinity : 1));
          scales.push_back(engine.step().next_loss_scale);
        }
        return scales;
      };
      const auto file = (folder.path() / "full").string();
      const auto shards = (folder.path() / "shards").string();
      steps(0, 7);  // in the middle of a window
      engine.save(shards);
      engine.save_full(file);
      const auto expected = steps(7, 12);
      const auto expected_weights = weights(engine);
      engine.load(shards);
      EXPECT_EQ(steps(7, 12), expected);
      expect_equal(weights(engine), expected_weights);
      engine.load_full(file);
      EXPECT_EQ(steps(7, 12), expected);
      expect_equal(weights(engine), expected_weights);
      engine.load_weights(file);
      EXPECT_EQ(engine.loss_scale(), 1024) << "training begins anew";
    });
  }
}

// Its gradients are computed before backward begins.
TEST(Fp16, AFusedLossKeepsSmallGradients) {
  struct Classes : nn::Module {
    Classes() : weight(register_parameter("weight", torch::zeros({2000, 16}))) {}
    at::Tensor weight;
  };
  const auto gradient_of = [](const Config& c) {
    auto net = std::make_shared<Classes>();
    Engine engine(net, Sgd{}, c);
    const auto x = torch::sin(torch::arange(512 * 16) * 0.37).view({512, 16});
    const auto targets = torch::arange(512, at::kLong) * 3;
    engine.backward(linear_cross_entropy(x.to(net->weight.scalar_type()), net->weight, targets));
    auto gradient = engine.gradient("weight");
    EXPECT_TRUE(engine.step().updated);
    return gradient.narrow(0, 1990, 10).clone();  // of classes that are no target: 1 / 2000 / 512
  };
  const auto expected = gradient_of(config(0));
  EXPECT_GT(expected.norm().item<double>(), 0);
  EXPECT_LT((gradient_of(half(0)) - expected).norm().item<double>(),
            2e-3 * expected.norm().item<double>());
}

// fp16 parameters and gradients take what bf16 ones do.
TEST(Fp16, MemoryIsTheFormulaByTheLedger) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, half(stage), group);
      train(engine, *net, 2);
      const auto formula = engine.memory_formula();
      const auto& ledger = *group->ledger();
      EXPECT_EQ(ledger.usage(Category::parameters).current, formula.parameters);
      EXPECT_EQ(ledger.usage(Category::gradients).peak, formula.gradients);
      EXPECT_EQ(ledger.usage(Category::optimizer).current, formula.optimizer);
      auto other = std::make_shared<Net>();
      Engine bf16(other, AdamW{}, config(stage, true), group);
      EXPECT_EQ(bf16.memory_formula().total(), formula.total());
    });
  }
}

// The bytes that a step moves: sent to other ranks, and from and to the disk and the host.
std::array<int64_t, 7> moved_by(Engine& engine) {
  auto& traffic = engine.group().traffic();
  const auto sent = [&](comm::Collective collective) {
    return traffic.count(collective).logical_bytes;
  };
  const auto disk = engine.disk();
  const auto host = engine.host_traffic();
  return {sent(comm::Collective::all_gather),
          sent(comm::Collective::reduce_scatter),
          sent(comm::Collective::all_reduce),
          disk.read,
          disk.written,
          host.down,
          host.up};
}

TEST(Fp16, WhatASkippedStepMovesIsItsFormula) {
  const TemporaryFolder folder;
  std::vector<Config> all;
  for (int stage = 0; stage <= 3; ++stage) {
    auto c = half(stage);
    c.one_sided_gather = false;
    c.max_live_parameters = 0;
    all.insert(all.end(), {c, optimizer_on_host(c), on_disk(c, folder)});
  }
  auto undone = on_disk(half(3), folder);
  undone.one_sided_gather = false;
  undone.max_live_parameters = 0;
  undone.update_in_backward = true;
  all.push_back(undone);
  for (auto& c : all) {
    c.offload_optimizer.pipeline_read = false;  // what is read ahead would be another step's
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, c, group);
      train(engine, *net, 3);
      int64_t gathered = 0;
      for (const bool skips : {true, false}) {
        engine.complete_update();
        const auto before = moved_by(engine);
        engine.backward(loss_of(*net, group->rank(), 7) * (skips ? kInfinity : 1.0));
        ASSERT_EQ(engine.step().updated, !skips);
        engine.complete_update();
        auto moved = moved_by(engine);
        for (size_t i = 0; i < moved.size(); ++i) moved[i] -= before[i];
        auto formula = engine.traffic_formula(!skips);
        if (c.stage == 3) {  // a bias is not gathered for backward: passes gather alike
          if (!skips) {
            EXPECT_EQ(moved[0], gathered);
          }
          EXPECT_LE(moved[0], formula.all_gather);
          gathered = formula.all_gather = moved[0];
        }
        if (skips && c.update_in_backward) {  // units that overflow themselves are not updated
          EXPECT_LE(moved[3], formula.disk_read);
          EXPECT_LE(moved[4], formula.disk_written);
          formula.disk_read = moved[3];
          formula.disk_written = moved[4];
        }
        EXPECT_EQ(moved, (std::array{formula.all_gather, formula.reduce_scatter, formula.all_reduce,
                                     formula.disk_read, formula.disk_written, formula.host_down,
                                     formula.host_up}))
            << "stage " << c.stage << ", skips " << skips << ", in backward "
            << c.update_in_backward;
      }
    });
  }
}

// 65536 is no number of fp16, and so infinite as the first gradient.
TEST(Fp16, ALossInFp16LowersTheScaleUntilItFits) {
  auto c = half(1);
  c.loss_scaling = {.initial_power = 17, .hysteresis = 1};
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{.lr = 1e-2}, c);
  std::vector<bool> updated;
  for (int step = 0; step < 3; ++step) {
    engine.backward(loss_of(*net, 0, step).to(at::kHalf));
    updated.push_back(engine.step().updated);
  }
  EXPECT_EQ(updated, (std::vector{false, false, true}));
  EXPECT_EQ(engine.loss_scale(), 32768);
}

TEST(Fp16, ContradictionsAreNamed) {
  const auto refused = [](auto change) {
    auto c = half(3);
    change(c);
    return message_of<ConfigError>([&] { c.validate(); });
  };
  EXPECT_THAT(refused([](Config& c) { c.bf16 = true; }), HasSubstr("both true"));
  EXPECT_THAT(refused([](Config& c) { c.update_in_backward = true; }),
              AllOf(HasSubstr("not all optimizer states are on disk"),
                    HasSubstr("switch update_in_backward off")));
  EXPECT_THAT(refused([](Config& c) { c.loss_scaling.window = 0; }),
              HasSubstr("loss_scale_window is 0"));
  EXPECT_THAT(refused([](Config& c) { c.loss_scaling.minimum = 0; }),
              HasSubstr("fp16.min_loss_scale is 0"));
  EXPECT_EQ(refused([](Config& c) { c.loss_scaling = {.fixed = 8, .window = 0}; }),
            "nothing was thrown");
}

// --- How gradients are sent.

std::vector<at::Tensor> weights_of_run(const Config& c, int ranks, int64_t* sent = nullptr) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    train(engine, *net, 2);
    const auto sent_so_far = [&] {
      int64_t bytes = 0;
      for (const auto collective : {comm::Collective::reduce_scatter, comm::Collective::all_reduce})
        bytes += group->traffic().count(collective).logical_bytes;
      return bytes;
    };
    const auto before = sent_so_far();
    train(engine, *net, 1, 2);
    const auto formula = engine.traffic_formula();
    EXPECT_EQ(sent_so_far() - before, formula.reduce_scatter + formula.all_reduce);
    if (sent != nullptr && group->rank() == 0) *sent = sent_so_far() - before;
    train(engine, *net, 3, 3);
    return weights(engine);
  });
}

TEST(CommunicationDtype, DecidesWhatIsSentAndRoundsOnceMore) {
  struct Case {
    Config base;
    DtypeName sent;
    double factor;  // of the bytes at one micro-batch
    bool same;      // results
  };
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int64_t k : {1, 3}) {
      const auto fp32 = config(stage, false, k);
      const auto bf16 = config(stage, true, k);
      const bool sends_fp32 = k > 1 && stage < 2;  // the sums of micro-batches
      const std::vector<Case> cases{
          {fp32, DtypeName::fp32, 1, true},
          {fp32, DtypeName::bf16, 0.5, false},
          {fp32, DtypeName::fp16, 0.5, false},
          {bf16, DtypeName::bf16, sends_fp32 ? 0.5 : 1, !sends_fp32},
          {bf16, DtypeName::fp32, sends_fp32 ? 1.0 : 2.0, true},
          {half(stage, k), DtypeName::fp32, sends_fp32 ? 1.0 : 2.0, true}};
      for (const auto& each : cases) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << ", k " << k << ", sent as "
                                        << static_cast<int>(each.sent));
        auto c = each.base;
        int64_t usual = 0;
        const auto expected = weights_of_run(c, 2, &usual);
        c.communication_dtype = each.sent;
        int64_t sent = 0;
        const auto actual = weights_of_run(c, 2, &sent);
        EXPECT_EQ(static_cast<double>(sent), each.factor * static_cast<double>(usual));
        bool equal = true;
        for (size_t i = 0; i < expected.size(); ++i) {
          equal = equal && torch::equal(actual[i], expected[i]);
          EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-1, 2e-2));
        }
        EXPECT_EQ(equal, each.same);
      }
    }
  }
}

TEST(CommunicationDtype, IsBitIdenticalOverStagesAndTiers) {
  const TemporaryFolder folder;
  for (const auto sent : {DtypeName::bf16, DtypeName::fp16}) {
    const auto of_stage = [&](int stage) {
      auto c = config(stage);
      c.communication_dtype = sent;
      return c;
    };
    for (int ranks = 1; ranks <= 3; ++ranks) {
      const auto expected = weights_of_run(of_stage(0), ranks);
      for (int stage = 1; stage <= 3; ++stage) {
        expect_equal(weights_of_run(of_stage(stage), ranks), expected);
        expect_equal(weights_of_run(optimizer_on_host(of_stage(stage)), ranks), expected);
        expect_equal(weights_of_run(on_disk(of_stage(stage), folder), ranks), expected);
      }
    }
  }
}

TEST(Predivision, ByAPowerOfTwoChangesNoBitAndKeepsSumsInRange) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      const auto expected = weights_of_run(config(stage, bf16), 2);
      auto c = config(stage, bf16);
      c.prescale_gradients = true;
      expect_equal(weights_of_run(c, 2), expected);
      c.prescale_gradients = false;
      c.gradient_predivide_factor = 8;
      expect_equal(weights_of_run(c, 2), expected);
    }
    // Twice fp16's greatest number, but for a factor of four.
    for (const double factor : {1.0, 4.0}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto c = config(stage);
        c.communication_dtype = DtypeName::fp16;
        c.prescale_gradients = factor == 1;
        c.gradient_predivide_factor = factor;
        Engine engine(net, Sgd{.lr = 1}, c, group);
        engine.backward((net->a->bias * 60000).sum());
        EXPECT_TRUE(torch::allclose(engine.gradient("a.bias"), torch::full({33}, 60000.0F), 1e-3));
        EXPECT_TRUE(engine.step().updated);
      });
    }
  }
}

// --- bf16

TEST(Bf16, CheckGradOverflowDecidesWhetherAStepIsLeftOut) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool checks : {true, false}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto c = config(stage, true);
        c.check_grad_overflow = checks;
        Engine engine(net, AdamW{}, c, group);
        const auto before = weights(engine);
        const auto loss = loss_of(*net, group->rank(), 0);
        engine.backward(group->rank() == 1 ? loss * kInfinity : loss);
        EXPECT_EQ(engine.step().updated, !checks);
        if (checks) {
          expect_equal(weights(engine), before);
        } else {
          EXPECT_TRUE(weights(engine)[0].isnan().any().template item<bool>());
        }
      });
    }
  }
}

// --- Without fp32 master weights.

Config narrow(int stage, bool states, int64_t accumulate = 1) {
  auto c = config(stage, true, accumulate);
  c.bf16_master_weights_and_grads = true;
  c.bf16_optimizer_states = states;
  return c;
}

TEST(NarrowStates, TakeTheBytesOfTheFormula) {
  for (const bool states : {false, true}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{}, narrow(stage, states, 2), group);
        train(engine, *net, 2);
        const auto formula = engine.memory_formula();
        int64_t elements = 0;
        for (const auto& unit : engine.layout().units()) elements += unit.numel;
        EXPECT_EQ(formula.optimizer, elements * (states ? 4 : 8) / (stage >= 1 ? 2 : 1));
        EXPECT_EQ(formula.gradients, elements * 2 / (stage >= 2 ? 2 : 1));
        EXPECT_EQ(group->ledger()->usage(Category::optimizer).current, formula.optimizer);
        EXPECT_EQ(group->ledger()->usage(Category::gradients).peak, formula.gradients);
      });
    }
  }
}

// Updates far below half of a weight's last place: to nearest nothing would ever change.
TEST(NarrowStates, SmallUpdatesAreNotLost) {
  struct Line : nn::Module {
    Line() : weight(register_parameter("weight", torch::ones({20000}))) {}
    at::Tensor weight;
  };
  auto net = std::make_shared<Line>();
  auto c = narrow(0, true);
  Engine engine(net, Sgd{.lr = 1e-4}, c);
  for (int i = 0; i < 20; ++i) {
    engine.backward(net->weight.to(at::kFloat).sum());
    engine.step();
  }
  const auto mean = engine.parameter("weight").mean().item<double>();
  EXPECT_NEAR(mean, 1 - 20 * 1e-4, 3e-4);
}

// fp32 parameters of the net above, whose layers compute in 16 bits.
std::vector<at::Tensor> run_cast(Config c, int ranks, AutocastDtype dtype) {
  c.autocast = {.enabled = true, .dtype = dtype};
  std::vector<at::Tensor> result;
  run_as_threads(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    std::vector<at::Tensor> mine;
    for (int64_t i = 0; i < 6 * c.gradient_accumulation_steps; ++i) {
      const auto loss = [&] {
        const Autocast casts(engine.config().autocast_dtype());
        EXPECT_EQ(net->forward(input(0, 0, at::kFloat)).scalar_type(), *c.autocast_dtype());
        return loss_of(*net, group->rank(), i);
      }();
      engine.backward(loss);
      engine.step();
      mine.push_back(loss.detach());
    }
    for (const auto& weight : weights(engine)) mine.push_back(weight.clone());
    if (group->rank() == 0) result = std::move(mine);
  });
  return result;
}

TEST(EngineAutocast, EveryStageGivesTheSameBits) {
  const TemporaryFolder folder;
  for (const auto dtype : {AutocastDtype::bf16, AutocastDtype::fp16}) {
    for (int ranks = 1; ranks <= 2; ++ranks) {
      const auto expected = run_cast(config(0), ranks, dtype);
      for (int stage = 1; stage <= 3; ++stage) {
        SCOPED_TRACE(testing::Message() << "ranks " << ranks << ", stage " << stage);
        expect_equal(run_cast(config(stage), ranks, dtype), expected);
      }
      expect_equal(run_cast(all_on_disk(config(3), folder), ranks, dtype), expected);
    }
  }
}

TEST(EngineAutocast, GradientsAreThoseOfLibTorchAlone) {
  auto alone = std::make_shared<Net>();
  auto net = std::make_shared<Net>();
  auto c = config(3);
  c.autocast.enabled = true;
  Engine engine(net, Sgd{.lr = 1e-2}, c);
  const auto loss_with = [](Net& of) {
    const Autocast casts(at::kBFloat16);
    return loss_of(of, 0, 0);
  };
  loss_with(*alone).backward();
  engine.backward(loss_with(*net));
  for (const auto& p : alone->named_parameters())
    EXPECT_TRUE(engine.gradient(p.key()).equal(p.value().grad())) << p.key();
}

TEST(EngineAutocast, InFp16TheLossIsScaledAndOverflowsAreSkipped) {
  auto c = overflowing(config(2));
  c.autocast = {.enabled = true, .dtype = AutocastDtype::fp16};
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-3}, c, group);
    EXPECT_EQ(engine.loss_scale(), 16777216);
    const auto loss = [&] {
      const Autocast casts(engine.config().autocast_dtype());
      return loss_of(*net, group->rank(), 0);
    }();
    engine.backward(loss);
    const auto result = engine.step();
    EXPECT_FALSE(result.updated);
    EXPECT_EQ(result.loss_scale, 16777216);
  });
  c.bf16 = true;
  EXPECT_THROW(c.validate(), ConfigError);
}

}  // namespace
}  // namespace zero
