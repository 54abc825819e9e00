// The loss scale's rule against PyTorch's operator, DeepSpeed's rule, and DeepSpeed's own class.
#include "zero/optim/loss_scale.h"

#include <ATen/ops/_amp_update_scale.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/optim/loss_scaler.h"

namespace zero {
namespace {

using testing::HasSubstr;

std::vector<bool> overflows(int count, double probability, unsigned seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution draw(probability);
  std::vector<bool> all;
  for (int i = 0; i < count; ++i) all.push_back(draw(random));
  return all;
}

// DeepSpeed 0.19.8 as its documentation and class state it: iterations counted from 0, the last
// overflow at first at -1.
class DeepSpeedRule {
 public:
  explicit DeepSpeedRule(const LossScaling& rule)
      : rule_(rule),
        scale_(std::pow(2.0, static_cast<double>(rule.initial_power))),
        left_(rule.hysteresis) {}
  bool update(bool overflow) {
    if (overflow) {
      if (left_ == 1) {
        if (scale_ == rule_.minimum) return false;
        scale_ = std::max(scale_ / 2, rule_.minimum);
      } else {
        --left_;
      }
      last_ = iteration_;
    } else {
      if (rule_.consecutive_hysteresis) left_ = rule_.hysteresis;
      const int64_t since = iteration_ - last_ - 1;
      if (since > 0 && since % rule_.window == 0) {
        left_ = rule_.hysteresis;
        scale_ *= 2;
      }
    }
    ++iteration_;
    return true;
  }
  double scale() const { return scale_; }

 private:
  LossScaling rule_;
  double scale_;
  int64_t left_;
  int64_t iteration_ = 0;
  int64_t last_ = -1;
};

std::vector<LossScaling> rules() {
  std::vector<LossScaling> all;
  for (const int64_t window : {1, 2, 7}) {
    for (const int64_t hysteresis : {1, 2, 3}) {
      for (const bool consecutive : {false, true}) {
        for (const double minimum : {1.0, 3.0}) {
          LossScaling rule{.initial_power = 5,
                           .window = window,
                           .hysteresis = hysteresis,
                           .consecutive_hysteresis = consecutive,
                           .minimum = minimum};
          all.push_back(rule);
        }
      }
    }
  }
  return all;
}

TEST(LossScale, FollowsDeepSpeedsRuleStepByStep) {
  int floors = 0;
  for (const auto& rule : rules()) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      auto unbounded = rule;
      unbounded.maximum = std::numeric_limits<double>::infinity();
      LossScale scale(unbounded);
      DeepSpeedRule expected(rule);
      for (const bool overflow : overflows(300, 0.05 + 0.02 * seed, seed)) {
        ASSERT_EQ(scale.value(), expected.scale());
        const bool goes_on = expected.update(overflow);
        ASSERT_EQ(scale.update(overflow), goes_on);
        if (goes_on) continue;
        ++floors;
        EXPECT_EQ(scale.value(), rule.minimum);
        break;
      }
    }
  }
  EXPECT_GT(floors, 10) << "the floor is reached";
}

TEST(LossScale, FollowsPyTorchsOperatorStepByStep) {
  for (const int64_t window : {1, 3, 2000}) {
    auto rule = LossScaling::torch();
    if (window < 2000) rule.window = window;
    LossScale scale(rule);
    auto theirs = torch::full({}, 65536.0F);
    auto tracker = torch::zeros({}, at::kInt);
    for (const bool overflow : overflows(5000, 0.02, 3)) {
      ASSERT_EQ(static_cast<float>(scale.value()), theirs.item<float>());
      EXPECT_TRUE(scale.update(overflow));
      const auto found = torch::full({}, overflow ? 1.0F : 0.0F);
      at::_amp_update_scale_(theirs, tracker, found, 2.0, 0.5, rule.window);
    }
  }
}

TEST(LossScale, AFixedOneStays) {
  LossScale scale({.fixed = 128});
  EXPECT_FALSE(scale.dynamic());
  for (const bool overflow : {true, false, true, true, true}) EXPECT_TRUE(scale.update(overflow));
  EXPECT_EQ(scale.value(), 128);
}

TEST(LossScale, GoesOnFromItsState) {
  const LossScaling rule{.initial_power = 4, .window = 3, .hysteresis = 2};
  LossScale straight(rule);
  LossScale resumed(rule);
  const auto all = overflows(200, 0.1, 5);
  for (size_t i = 0; i < all.size(); ++i) {
    const bool goes_on = straight.update(all[i]);
    LossScale next(rule);
    next.restore(resumed.state());
    ASSERT_EQ(next.update(all[i]), goes_on);
    resumed = next;
    ASSERT_EQ(resumed.state(), straight.state()) << "step " << i;
  }
}

TEST(LossScale, RefusesNumbersThatMakeNoSense) {
  const auto refused = [](const LossScaling& rule) {
    return message_of<ConfigError>([&] { LossScale scale(rule); });
  };
  EXPECT_THAT(refused({.fixed = -1}), HasSubstr("loss_scale is -1"));
  EXPECT_THAT(refused({.initial_power = 128}), HasSubstr("initial_scale_power is 128"));
  EXPECT_THAT(refused({.window = 0}), HasSubstr("loss_scale_window is 0"));
  EXPECT_THAT(refused({.hysteresis = 0}), HasSubstr("hysteresis is 0"));
  EXPECT_THAT(refused({.growth = 1}), HasSubstr("growth is 1"));
  LossScale scale(LossScaling{});
  EXPECT_THAT(message_of<ConfigError>([&] { scale.restore({.scale = 0}); }), HasSubstr("is 0"));
  EXPECT_THAT(message_of<ConfigError>([&] { scale.restore({.scale = 1e300}); }),
              HasSubstr("a number of fp32"));
  EXPECT_THAT(message_of<ConfigError>([&] { scale.restore({.clean = -9}); }), HasSubstr("is -9"));
  EXPECT_THAT(refused({.fixed = 1e39}), HasSubstr("loss_scale is 1e+39"));
  EXPECT_THAT(refused({.maximum = 2}), HasSubstr("maximum is 2"));
}

// --- Without an engine.

struct Line : torch::nn::Module {
  Line() : weight(register_parameter("weight", torch::full({4}, 0.5F))) {}
  at::Tensor loss(double factor) { return (weight * factor).pow(2).mean(); }
  at::Tensor weight;
};

TEST(LossScaler, StepsAsAPlainLoopAndLeavesOutWhatOverflows) {
  Line scaled;
  Line plain;
  torch::optim::SGD optimizer(scaled.parameters(), 0.1);
  torch::optim::SGD reference(plain.parameters(), 0.1);
  LossScaler scaler({.initial_power = 10, .window = 2, .hysteresis = 1});
  const double infinite = std::numeric_limits<double>::infinity();
  for (const double factor : {1.0, 2.0, infinite, 3.0, 1.5}) {
    optimizer.zero_grad();
    scaler.scale(scaled.loss(factor)).backward();
    const double before = scaler.scale();
    const bool stepped = scaler.step(optimizer);
    EXPECT_EQ(stepped, std::isfinite(factor));
    EXPECT_EQ(scaler.overflow(), !stepped);
    scaler.update();
    EXPECT_FALSE(scaler.overflow());
    if (stepped) {
      reference.zero_grad();
      plain.loss(factor).backward();
      reference.step();
    } else {
      EXPECT_EQ(scaler.scale(), before / 2);
    }
    EXPECT_TRUE(torch::equal(scaled.weight, plain.weight)) << "powers of two are exact";
  }
}

TEST(LossScaler, UnscalesForClippingOnce) {
  Line line;
  torch::optim::SGD optimizer(line.parameters(), 0.1);
  LossScaler scaler(LossScaling::torch());
  scaler.scale(line.loss(1)).backward();
  EXPECT_FALSE(scaler.unscale(optimizer));
  EXPECT_TRUE(torch::allclose(line.weight.grad(), torch::full({4}, 0.25F)));
  EXPECT_THAT(message_of<Error>([&] { scaler.unscale(optimizer); }), HasSubstr("twice"));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(torch::allclose(line.weight, torch::full({4}, 0.475F)));
  scaler.update();
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }), HasSubstr("before LossScaler::step"));
}

TEST(LossScaler, AStepWithoutAnUpdateInBetweenIsAnError) {
  Line line;
  torch::optim::SGD optimizer(line.parameters(), 0.1);
  LossScaler scaler(LossScaling::torch());
  scaler.scale(line.loss(1)).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  const auto after = line.weight.detach().clone();
  optimizer.zero_grad();
  scaler.scale(line.loss(1)).backward();
  EXPECT_THAT(message_of<Error>([&] { scaler.step(optimizer); }), HasSubstr("LossScaler::update"));
  EXPECT_TRUE(torch::equal(line.weight, after)) << "scaled gradients are not used";
}

TEST(LossScaler, OneOptimizersOverflowIsNotAnothers) {
  Line first;
  Line second;
  torch::optim::SGD of_first(first.parameters(), 0.1);
  torch::optim::SGD of_second(second.parameters(), 0.1);
  LossScaler scaler({.initial_power = 3, .hysteresis = 1});
  scaler.scale(first.loss(std::numeric_limits<double>::infinity())).backward();
  scaler.scale(second.loss(1)).backward();
  EXPECT_FALSE(scaler.step(of_first));
  EXPECT_TRUE(scaler.step(of_second));
  EXPECT_TRUE(scaler.overflow());
  scaler.update();
  EXPECT_EQ(scaler.scale(), 4) << "the scale is of both";
}

TEST(LossScaler, HeedsWhatAnotherRankFound) {
  Line line;
  torch::optim::SGD optimizer(line.parameters(), 0.1);
  LossScaler scaler({.initial_power = 3, .hysteresis = 1});
  scaler.scale(line.loss(1)).backward();
  EXPECT_FALSE(scaler.unscale(optimizer));
  scaler.add_overflow(true);
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_TRUE(torch::equal(line.weight, torch::full({4}, 0.5F)));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(LossScaler, AnOverflowAtTheLeastScaleIsAnError) {
  LossScaler scaler({.initial_power = 0, .hysteresis = 1});
  scaler.add_overflow(true);
  EXPECT_THAT(message_of<Error>([&] { scaler.update(); }), HasSubstr("at its minimum already, 1"));
}

TEST(LossScaler, RefusesGradientsInFp16) {
  const auto weight = torch::ones({3}, at::kHalf).requires_grad_();
  weight.sum().backward();
  torch::optim::SGD optimizer({weight}, 0.1);
  LossScaler scaler;
  EXPECT_THAT(message_of<ConfigError>([&] { scaler.unscale(optimizer); }), HasSubstr("fp16"));
}

}  // namespace
}  // namespace zero
