// Losses that leave what the steps before had.
#include "zero/train/loss_spikes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace zero::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// A falling loss with some noise.
LossSample usual(size_t step) {
  return {
      .loss = 5 - 0.005 * static_cast<double>(step) + 0.05 * std::sin(static_cast<double>(step)),
      .grad_norm = 1,
      .loss_scale = 1024,
      .lr = 1e-3};
}

/// After `steps` ordinary ones, none of which is a spike.
LossSpikes after(size_t steps) {
  LossSpikes spikes;
  for (size_t step = 0; step < steps; ++step) EXPECT_EQ(spikes.add(usual(step), {5, 5}, 2), "");
  return spikes;
}

TEST(LossSpikes, OneBatchIsToldFromAllOfThem) {
  auto spikes = after(100);
  auto sample = usual(100);
  sample.loss = 7;
  // The order is by micro-batch, then by rank.
  EXPECT_THAT(spikes.add(sample, {4.5, 4.5, 4.5, 14.5}, 2),
              AllOf(HasSubstr("The loss 7.0000 is a spike"),
                    HasSubstr("one batch: rank 1's micro-batch 2 has 14.5000, the others 4.5000"),
                    Not(HasSubstr("gradient norm"))));
  sample.grad_norm = 30;
  sample.loss_scale = 65536;
  EXPECT_THAT(spikes.add(sample, {7, 7, 7, 7}, 2),
              AllOf(HasSubstr("All batches are higher"),
                    HasSubstr("gradient norm of the update before is 30, 30 times the usual 1"),
                    HasSubstr("loss scale is 6.55e+04, 64 times the usual 1.02e+03"),
                    Not(HasSubstr("learning rate"))));
  EXPECT_EQ(spikes.add(usual(101), {4.5, 4.5}, 2), "") << "spikes do not become the usual";
}

TEST(LossSpikes, ALevelThatStaysBecomesTheUsualOne) {
  auto spikes = after(64);
  auto higher = usual(0);
  higher.loss = 9;
  size_t told = 0;
  for (size_t step = 0; step < 200; ++step) told += spikes.add(higher, {9}, 1).empty() ? 0 : 1;
  EXPECT_EQ(told, LossSpikes::kWindow);
}

TEST(LossSpikes, NoneInTheFirstStepsNorOfAConstantLossThatRisesALittle) {
  LossSpikes spikes;
  EXPECT_EQ(spikes.add({.loss = 1}, {1}, 1), "");
  for (size_t step = 0; step + 1 < LossSpikes::kWindow; ++step)
    EXPECT_EQ(spikes.add({.loss = step % 7 == 0 ? 50.0 : 1.0}, {1}, 1), "");
  LossSpikes constant;
  for (size_t step = 0; step < LossSpikes::kWindow; ++step) (void)constant.add({.loss = 2}, {2}, 1);
  EXPECT_EQ(constant.add({.loss = 2.1}, {2.1F}, 1), "");
  EXPECT_THAT(constant.add({.loss = 2.5}, {2.5F}, 1), HasSubstr("2.5000 is a spike"));
}

}  // namespace
}  // namespace zero::train
