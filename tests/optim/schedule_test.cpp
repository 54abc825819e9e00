#include "zero/optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "zero/base/error.h"

namespace zero::optim {
namespace {

TEST(WarmupDecay, StartsAboveZeroPeaksAtTheEndOfTheWarmupAndReachesTheMinimumAtTheLastStep) {
  for (const auto decay : {Decay::linear, Decay::cosine}) {
    const WarmupDecay s{
        .lr = 0.8, .min_lr = 0.08, .warmup_steps = 4, .total_steps = 20, .decay = decay};
    EXPECT_DOUBLE_EQ(s.rate(1), 0.2);
    EXPECT_DOUBLE_EQ(s.rate(3), 0.6);
    EXPECT_EQ(s.rate(4), 0.8);
    EXPECT_LT(s.rate(5), 0.8);
    EXPECT_DOUBLE_EQ(s.rate(12), (0.8 + 0.08) / 2) << "half-way down";
    EXPECT_GT(s.rate(19), 0.08);
    EXPECT_EQ(s.rate(20), 0.08);
    EXPECT_EQ(s.rate(21), 0.08);
    EXPECT_EQ(s.rate(1000000), 0.08);
    for (int64_t step = 5; step <= 20; ++step) EXPECT_LT(s.rate(step), s.rate(step - 1)) << step;
  }
}

TEST(WarmupDecay, FollowsItsCurve) {
  const WarmupDecay linear{
      .lr = 1, .min_lr = 0.2, .warmup_steps = 0, .total_steps = 4, .decay = Decay::linear};
  EXPECT_DOUBLE_EQ(linear.rate(1), 0.8);
  EXPECT_DOUBLE_EQ(linear.rate(3), 0.4);
  const WarmupDecay cosine{.lr = 1, .total_steps = 3};
  EXPECT_DOUBLE_EQ(cosine.rate(1), 0.75);
  EXPECT_DOUBLE_EQ(cosine.rate(2), 0.25);
}

TEST(WarmupDecay, CanBeAllWarmupOrOneStepOrHaveNoDecay) {
  const WarmupDecay all{.lr = 1, .min_lr = 0.5, .warmup_steps = 4, .total_steps = 4};
  EXPECT_EQ(all.rate(3), 0.75);
  EXPECT_EQ(all.rate(4), 1) << "a warm-up to the last step ends at the peak";
  EXPECT_EQ(all.rate(5), 0.5);
  EXPECT_EQ((WarmupDecay{.lr = 1, .min_lr = 0.5, .total_steps = 1}.rate(1)), 0.5);
  const WarmupDecay flat{.lr = 1, .warmup_steps = 2, .decay = Decay::constant};
  EXPECT_EQ(flat.rate(1), 0.5);
  EXPECT_EQ(flat.rate(2), 1);
  EXPECT_EQ(flat.rate(1000000), 1);
}

TEST(WarmupDecay, StaysUntilItsLastSteps) {
  WarmupDecay s{.lr = 1,
                .min_lr = 0.2,
                .warmup_steps = 2,
                .total_steps = 20,
                .decay = Decay::wsd,
                .decay_steps = 4};
  EXPECT_EQ(s.rate(1), 0.5);
  for (int64_t step = 2; step <= 16; ++step) EXPECT_EQ(s.rate(step), 1) << step;
  EXPECT_DOUBLE_EQ(s.rate(17), 0.8);
  EXPECT_DOUBLE_EQ(s.rate(18), 0.6);
  EXPECT_DOUBLE_EQ(s.rate(19), 0.4);
  EXPECT_EQ(s.rate(20), 0.2);
  EXPECT_EQ(s.rate(1000), 0.2);
  s.decay_steps = std::nullopt;
  EXPECT_EQ(s.rate(18), 1) << "a tenth";
  EXPECT_DOUBLE_EQ(s.rate(19), 0.6);
}

TEST(DeepSpeedWarmup, HasTheMinimumForTwoUpdatesThenGrowsAndStays) {
  DeepSpeedWarmup s{.min_lr = 0.1, .max_lr = 1.1, .warmup_steps = 8};
  EXPECT_EQ(s.rate(1), 0.1);
  EXPECT_EQ(s.rate(2), 0.1);
  EXPECT_DOUBLE_EQ(s.rate(3), 0.1 + std::log(2) / std::log(8));
  EXPECT_DOUBLE_EQ(s.rate(9), 1.1) << "log(8) / log(8): the peak comes one step before the end";
  EXPECT_EQ(s.rate(10), 1.1);
  EXPECT_EQ(s.rate(100000), 1.1);
  s.type = WarmupType::linear;
  EXPECT_DOUBLE_EQ(s.rate(3), 0.1 + 1.0 / 8);
  EXPECT_DOUBLE_EQ(s.rate(9), 0.1 + 7.0 / 8);
  EXPECT_EQ(s.rate(10), 1.1);
  s.warmup_steps = 1;
  EXPECT_DOUBLE_EQ(s.rate(3), 0.6) << "a warm-up of 1 counts as 2";
}

TEST(DeepSpeedWarmupDecay, DecaysLinearlyToTheMinimum) {
  const DeepSpeedWarmupDecay s{.min_lr = 0.1,
                               .max_lr = 1.1,
                               .warmup_steps = 4,
                               .type = WarmupType::linear,
                               .total_steps = 14};
  EXPECT_EQ(s.rate(1), 0.1);
  EXPECT_DOUBLE_EQ(s.rate(4), 0.6);
  EXPECT_DOUBLE_EQ(s.rate(6), 1.1);
  EXPECT_DOUBLE_EQ(s.rate(7), 1.0);
  EXPECT_DOUBLE_EQ(s.rate(15), 0.2);
  EXPECT_DOUBLE_EQ(s.rate(16), 0.1);
  EXPECT_DOUBLE_EQ(s.rate(1000), 0.1);
}

TEST(DeepSpeedWarmupCosine, StartsAtZeroPeaksAndStaysAtItsFloor) {
  const DeepSpeedWarmupCosine s{.lr = 2,
                                .warmup_min_ratio = 0.25,
                                .cos_min_ratio = 0.1,
                                .warmup_steps = 4,
                                .total_steps = 12,
                                .type = WarmupType::linear};
  EXPECT_EQ(s.rate(1), 0);
  EXPECT_DOUBLE_EQ(s.rate(2), 0.5);
  EXPECT_DOUBLE_EQ(s.rate(4), 2 * (0.25 + 0.75 * 0.5));
  const double first = (1 + std::cos(std::acos(-1.0) / 8)) / 2;
  EXPECT_DOUBLE_EQ(s.rate(6), 2 * (0.1 + 0.9 * first));
  EXPECT_DOUBLE_EQ(s.rate(9), 2 * 0.55) << "half-way down";
  EXPECT_DOUBLE_EQ(s.rate(13), 0.2);
  EXPECT_DOUBLE_EQ(s.rate(1000), 0.2);
}

// The rate rises in 4 updates (first), falls in 8 (second), and then decays.
TEST(DeepSpeedOneCycle, RisesFallsAndDecaysWithTheMomentumAgainstIt) {
  const DeepSpeedOneCycle s{.min_lr = 1,
                            .max_lr = 5,
                            .decay_rate = 0.5,
                            .first_steps = 4,
                            .second_steps = 8,
                            .decay_steps = 2,
                            .min_momentum = 0.5,
                            .max_momentum = 0.9,
                            .momentum_decay_rate = 0.01};
  const std::vector<double> rates{1, 2,   3, 4,   5, 4.5,      4,       3.5,
                                  3, 2.5, 2, 1.5, 1, 1 / 1.25, 1 / 1.5, 1 / 1.75};
  for (size_t i = 0; i < rates.size(); ++i)
    EXPECT_NEAR(s.rate(static_cast<int64_t>(i) + 1), rates[i], 1e-14) << i + 1;
  const std::vector<double> momenta{0.5, 0.8,  0.7, 0.6,  0.5, 0.55,   0.6,   0.65,
                                    0.7, 0.75, 0.8, 0.85, 0.9, 0.9045, 0.909, 0.9135};
  for (size_t i = 0; i < momenta.size(); ++i) {
    const auto betas = s.betas(static_cast<int64_t>(i) + 1);
    ASSERT_TRUE(betas);
    EXPECT_NEAR(betas->beta1, momenta[i], 1e-14) << i + 1;
    EXPECT_EQ(betas->beta2, 0.99);
  }
  auto alone = s;
  alone.cycle_momentum = false;
  EXPECT_EQ(alone.betas(3), std::nullopt);
  EXPECT_EQ(betas(Schedule(WarmupDecay{}), 3), std::nullopt);
}

TEST(DeepSpeedOneCycle, IsRefusedWhereARunIsSoLongThatTheMomentumGrowsToOne) {
  DeepSpeedOneCycle cycle{.min_lr = 1e-4, .max_lr = 1e-3, .first_steps = 4};
  cycle.decay_steps = 1;
  cycle.momentum_decay_rate = 0.01;
  EXPECT_NO_THROW(complete(cycle, {.steps = 12}));
  EXPECT_THAT([&] { complete(cycle, {.steps = 100}); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("decay_mom_rate")));
}

TEST(DeepSpeedOneCycle, HasStairsAndStaysWithoutADecay) {
  const DeepSpeedOneCycle s{
      .min_lr = 1, .max_lr = 5, .first_steps = 4, .first_stairs = 2, .second_stairs = 0};
  const std::vector<double> rates{1, 1, 3, 3, 5, 4, 3, 2, 1, 1, 1};
  for (size_t i = 0; i < rates.size(); ++i)
    EXPECT_NEAR(s.rate(static_cast<int64_t>(i) + 1), rates[i], 1e-14) << i + 1;
  EXPECT_EQ(s.betas(100)->beta1, 0.9);
}

TEST(DeepSpeedRangeTest, GrowsInALineOrInStairs) {
  DeepSpeedRangeTest s{.min_lr = 2, .step_size = 4, .step_rate = 0.5};
  EXPECT_EQ(s.rate(1), 2);
  EXPECT_DOUBLE_EQ(s.rate(2), 2.25);
  EXPECT_DOUBLE_EQ(s.rate(5), 3);
  EXPECT_DOUBLE_EQ(s.rate(101), 27);
  s.staircase = true;
  for (const int64_t step : {1, 2, 3, 4}) EXPECT_EQ(s.rate(step), 2);
  EXPECT_DOUBLE_EQ(s.rate(5), 3);
  EXPECT_DOUBLE_EQ(s.rate(8), 3);
  EXPECT_DOUBLE_EQ(s.rate(9), 4);
}

TEST(Complete, FillsInWhatIsLeftToTheRun) {
  const RunLength run{.lr = 0.5, .steps = 40, .warmup_steps = 8};
  EXPECT_EQ(complete(DeepSpeedWarmup{.warmup_steps = std::nullopt}, run),
            Schedule(DeepSpeedWarmup{.max_lr = 0.5, .warmup_steps = 8}));
  EXPECT_EQ(complete(DeepSpeedWarmupDecay{}, run),
            Schedule(DeepSpeedWarmupDecay{.max_lr = 1e-3, .total_steps = 40}));
  EXPECT_EQ(complete(DeepSpeedWarmupCosine{.total_steps = 9}, run),
            Schedule(DeepSpeedWarmupCosine{.lr = 0.5, .total_steps = 9}));
  EXPECT_EQ(complete(WarmupDecay{.lr = 0.25}, run),
            Schedule(WarmupDecay{.lr = 0.25, .total_steps = 40}));
  EXPECT_FALSE(ignores_optimizer_rate(DeepSpeedWarmup{}));
  EXPECT_TRUE(ignores_optimizer_rate(DeepSpeedWarmupDecay{}));
  EXPECT_TRUE(ignores_optimizer_rate(DeepSpeedOneCycle{}));
  EXPECT_FALSE(ignores_optimizer_rate(WarmupDecay{}));
}

TEST(Rate, OfAScheduleThatIsNotCompleteNamesWhatIsLeftOpen) {
  EXPECT_THAT([] { (void)rate(DeepSpeedWarmup{}, 3); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("warmup_max_lr")));
  EXPECT_THAT([] { (void)rate(DeepSpeedWarmupDecay{}, 3); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("total_num_steps")));
}

TEST(Check, NamesTheValueThatCannotBeUsed) {
  using testing::AllOf;
  using testing::HasSubstr;
  using testing::ThrowsMessage;
  const auto throws = [](const char* key, const char* value) {
    return ThrowsMessage<ConfigError>(AllOf(HasSubstr(key), HasSubstr(value)));
  };
  EXPECT_NO_THROW(check(WarmupDecay{.warmup_steps = 3, .total_steps = 3}));
  EXPECT_NO_THROW(check(WarmupDecay{.warmup_steps = 3, .decay = Decay::constant}));
  EXPECT_NO_THROW(check(DeepSpeedWarmup{}));
  EXPECT_NO_THROW(check(DeepSpeedWarmupCosine{}));
  EXPECT_THAT([] { check(WarmupDecay{.lr = -2}); }, throws("lr", "-2"));
  EXPECT_THAT([] { check(WarmupDecay{.total_steps = 0}); }, throws("total_steps", "0"));
  EXPECT_THAT([] { check(WarmupDecay{.warmup_steps = 7, .total_steps = 5}); },
              throws("warmup_steps", "7"));
  EXPECT_THAT([] { check(WarmupDecay{.lr = 1, .min_lr = 2, .total_steps = 5}); },
              throws("min_lr", "2"));
  EXPECT_THAT(
      [] {
        check(WarmupDecay{
            .warmup_steps = 3, .total_steps = 9, .decay = Decay::wsd, .decay_steps = 7});
      },
      throws("decay_steps", "7"));
  EXPECT_THAT([] { check(DeepSpeedWarmup{.warmup_steps = -1}); }, throws("warmup_num_steps", "-1"));
  EXPECT_THAT([] { check(DeepSpeedWarmupDecay{.total_steps = -1}); },
              throws("total_num_steps", "-1"));
  EXPECT_THAT([] { check(DeepSpeedOneCycle{.first_steps = 0}); },
              throws("cycle_first_step_size", "0"));
  EXPECT_THAT([] { check(DeepSpeedOneCycle{.max_momentum = 1}); }, throws("cycle_max_mom", "1"));
  EXPECT_THAT([] { check(DeepSpeedRangeTest{.step_size = 0}); },
              throws("lr_range_test_step_size", "0"));
  EXPECT_THAT([] { check(DeepSpeedWarmupCosine{.cos_min_ratio = NAN}); },
              throws("cos_min_ratio", "nan"));
}

}  // namespace
}  // namespace zero::optim
