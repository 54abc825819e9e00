#include "zero/train/schedule.h"

#include <gtest/gtest.h>

#include "zero/base/error.h"

namespace zero::train {
namespace {

TEST(Schedule, WarmsUpFromTheFirstStepToThePeak) {
  const Schedule schedule{.peak = 1.0, .warmup = 4, .steps = 10, .decay = Decay::cosine};
  EXPECT_DOUBLE_EQ(schedule.rate(1), 0.25);
  EXPECT_DOUBLE_EQ(schedule.rate(3), 0.75);
  EXPECT_DOUBLE_EQ(schedule.rate(4), 1.0);
  EXPECT_LT(schedule.rate(5), 1.0);
}

TEST(Schedule, ReachesTheFloorAtTheLastStepAndStaysThere) {
  for (const auto decay : {Decay::linear, Decay::cosine}) {
    const Schedule schedule{.peak = 1.0, .floor = 0.1, .warmup = 2, .steps = 12, .decay = decay};
    EXPECT_DOUBLE_EQ(schedule.rate(7), 0.55) << "half-way";
    EXPECT_DOUBLE_EQ(schedule.rate(12), 0.1);
    EXPECT_DOUBLE_EQ(schedule.rate(100), 0.1);
    for (int64_t step = 3; step <= 12; ++step)
      EXPECT_LT(schedule.rate(step), schedule.rate(step - 1));
  }
}

TEST(Schedule, DecaysLinearlyInEqualStepsAndByTheCosineInUnequalOnes) {
  const Schedule linear{.peak = 1.0, .steps = 4, .decay = Decay::linear};
  EXPECT_DOUBLE_EQ(linear.rate(1), 0.75);
  EXPECT_DOUBLE_EQ(linear.rate(3), 0.25);
  const Schedule cosine{.peak = 1.0, .steps = 4, .decay = Decay::cosine};
  EXPECT_NEAR(cosine.rate(1), 0.8535533905932737, 1e-15);
}

TEST(Schedule, CanStayConstant) {
  const Schedule schedule{.peak = 0.5, .floor = 0.1, .steps = 4, .decay = Decay::constant};
  for (int64_t step = 1; step <= 6; ++step) EXPECT_EQ(schedule.rate(step), 0.5);
}

TEST(Schedule, OfWarmUpAloneNeverDecays) {
  const Schedule schedule{.peak = 1.0, .warmup = 5, .steps = 5};
  EXPECT_DOUBLE_EQ(schedule.rate(5), 1.0);
}

TEST(Decay, IsFoundByName) {
  for (const auto decay : {Decay::constant, Decay::linear, Decay::cosine})
    EXPECT_EQ(decay_from(name(decay)), decay);
  try {
    decay_from("cosin");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("Did you mean 'cosine'?"), std::string::npos);
  }
}

}  // namespace
}  // namespace zero::train
