#include "zero/optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "zero/base/error.h"

namespace zero::optim {
namespace {

TEST(Constant, NeverChanges) {
  const Schedule schedule = Constant{.lr = 0.25};
  for (const int64_t step : {1, 2, 1000000}) EXPECT_EQ(rate(schedule, step), 0.25);
}

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

TEST(DeepSpeedWarmup, DecaysLinearlyToTheMinimumWithTotalSteps) {
  const DeepSpeedWarmup s{.min_lr = 0.1,
                          .max_lr = 1.1,
                          .warmup_steps = 4,
                          .type = WarmupType::linear,
                          .total_steps = 14};
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

TEST(Check, NamesTheValueThatCannotBeUsed) {
  using testing::AllOf;
  using testing::HasSubstr;
  using testing::ThrowsMessage;
  const auto throws = [](const char* key, const char* value) {
    return ThrowsMessage<ConfigError>(AllOf(HasSubstr(key), HasSubstr(value)));
  };
  EXPECT_NO_THROW(check(Constant{}));
  EXPECT_NO_THROW(check(WarmupDecay{.warmup_steps = 3, .total_steps = 3}));
  EXPECT_NO_THROW(check(WarmupDecay{.warmup_steps = 3, .decay = Decay::constant}));
  EXPECT_NO_THROW(check(DeepSpeedWarmup{}));
  EXPECT_NO_THROW(check(DeepSpeedWarmupCosine{}));
  EXPECT_THAT([] { check(Constant{.lr = -2}); }, throws("lr", "-2"));
  EXPECT_THAT([] { check(WarmupDecay{.total_steps = 0}); }, throws("total_steps", "0"));
  EXPECT_THAT([] { check(WarmupDecay{.warmup_steps = 7, .total_steps = 5}); },
              throws("warmup_steps", "7"));
  EXPECT_THAT([] { check(WarmupDecay{.lr = 1, .min_lr = 2, .total_steps = 5}); },
              throws("min_lr", "2"));
  EXPECT_THAT([] { check(DeepSpeedWarmup{.warmup_steps = 0}); }, throws("warmup_num_steps", "0"));
  EXPECT_THAT([] { check(DeepSpeedWarmup{.total_steps = -1}); }, throws("total_num_steps", "-1"));
  EXPECT_THAT([] { check(DeepSpeedWarmupCosine{.cos_min_ratio = NAN}); },
              throws("cos_min_ratio", "nan"));
}

}  // namespace
}  // namespace zero::optim
