#include "zero/models/layers/cross_entropy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/models/layers/softmax.h"

namespace zero {
namespace {

struct Problem {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor targets;
};

Problem problem(int64_t rows, int64_t width, int64_t vocabulary,
                at::ScalarType dtype = at::kFloat) {
  at::manual_seed(rows * 1000 + vocabulary);
  auto hidden = at::randn({rows, width}).to(dtype).requires_grad_();
  auto weight = at::randn({vocabulary, width}).to(dtype).requires_grad_();
  return {hidden, weight, at::randint(vocabulary, {rows}, at::kLong)};
}

struct Result {
  at::Tensor loss;
  at::Tensor hidden;
  at::Tensor weight;
};

Result gradients(const Problem& p, const at::Tensor& loss) {
  p.hidden.mutable_grad() = at::Tensor();
  p.weight.mutable_grad() = at::Tensor();
  loss.backward();
  return {loss.detach(), p.hidden.grad().clone(), p.weight.grad().clone()};
}

// The plain composition, in fp64 on the same (rounded) inputs.
Result reference(const Problem& p, double scale = 1, double smoothing = 0,
                 at::Reduction::Reduction reduction = at::Reduction::Mean) {
  auto hidden = p.hidden.detach().to(at::kDouble).requires_grad_();
  auto weight = p.weight.detach().to(at::kDouble).requires_grad_();
  auto loss = at::cross_entropy_loss(hidden.mm(weight.t()), p.targets, {}, reduction,
                                     kIgnoredTarget, smoothing);
  (loss * scale).backward();
  return {loss.detach(), hidden.grad(), weight.grad()};
}

double error(const at::Tensor& value, const at::Tensor& expected) {
  const auto difference = (value.to(at::kDouble) - expected).norm().item<double>();
  return difference / std::max(1e-30, expected.norm().item<double>());
}

LinearCrossEntropyOptions rows_at_a_time(int64_t rows, const Problem& p) {
  return {.logits_bytes = 4 * rows * p.weight.size(0)};
}

TEST(LinearCrossEntropy, EqualsThePlainCompositionForEveryChunking) {
  for (const int64_t rows : {1, 7, 24}) {
    for (const int64_t vocabulary : {1, 5, 259}) {
      const auto p = problem(rows, 16, vocabulary);
      const auto expected = reference(p);
      for (const int64_t chunk : {1, 5, 24, 1000}) {
        const auto result = gradients(
            p, linear_cross_entropy(p.hidden, p.weight, p.targets, rows_at_a_time(chunk, p)));
        EXPECT_EQ(result.loss.scalar_type(), at::kFloat);
        EXPECT_NEAR(result.loss.item<double>(), expected.loss.item<double>(), 1e-5)
            << rows << " " << vocabulary << " " << chunk;
        // With one word the gradient is zero; compare absolutely.
        EXPECT_LT((result.hidden - expected.hidden).abs().max().item<double>(), 2e-6);
        EXPECT_LT((result.weight - expected.weight).abs().max().item<double>(), 2e-6);
      }
    }
  }
}

TEST(LinearCrossEntropy, IgnoredTargetsHaveNeitherLossNorGradient) {
  auto p = problem(9, 8, 33);
  for (const int64_t row : {0, 4, 5, 8}) p.targets[row] = kIgnoredTarget;
  const auto expected = reference(p);
  const auto result =
      gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets, rows_at_a_time(2, p)));
  EXPECT_NEAR(result.loss.item<double>(), expected.loss.item<double>(), 1e-5);
  EXPECT_LT(error(result.hidden, expected.hidden), 1e-6);
  EXPECT_LT(error(result.weight, expected.weight), 1e-6);
  EXPECT_EQ(result.hidden[4].abs().max().item<float>(), 0.0F);
}

TEST(LinearCrossEntropy, SmoothsLabelsAndDividesByWhatIsGiven) {
  auto p = problem(9, 8, 33);
  p.targets[4] = kIgnoredTarget;
  for (const double smoothing : {0.0, 0.1, 1.0}) {
    for (const double divisor : {0.0, 1.0, 24.0}) {
      const auto expected = reference(p, divisor > 0 ? 1 / divisor : 1, smoothing,
                                      divisor > 0 ? at::Reduction::Sum : at::Reduction::Mean);
      auto options = rows_at_a_time(4, p);
      options.label_smoothing = smoothing;
      options.divisor = divisor;
      const auto result =
          gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets, options));
      EXPECT_NEAR(result.loss.item<double>(),
                  expected.loss.item<double>() / (divisor > 0 ? divisor : 1), 1e-5);
      EXPECT_LT(error(result.hidden, expected.hidden), 1e-6);
      EXPECT_LT(error(result.weight, expected.weight), 1e-6);
    }
  }
  for (const double bad : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets, {.label_smoothing = bad}),
                 ConfigError);
  }
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets, {.divisor = -1}), ConfigError);
  // Nothing is divided by zero: the sum of no loss is zero.
  p.targets.fill_(kIgnoredTarget);
  const auto none = linear_cross_entropy(p.hidden, p.weight, p.targets, {.divisor = 24});
  EXPECT_EQ(none.item<double>(), 0);
}

TEST(LinearCrossEntropy, IsNanWithZeroGradientWhenEveryTargetIsIgnored) {
  auto p = problem(3, 8, 33);
  p.targets.fill_(kIgnoredTarget);
  const auto result = gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets));
  EXPECT_TRUE(std::isnan(result.loss.item<float>()));
  EXPECT_EQ(result.hidden.abs().max().item<float>(), 0.0F);
  EXPECT_EQ(result.weight.abs().max().item<float>(), 0.0F);
}

TEST(LinearCrossEntropy, IsAccurateInLowPrecision) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    // Small logits, as a model's: their rounding is not what is tested.
    auto p = problem(40, 32, 501);
    p.hidden = (p.hidden.detach() * 0.3).to(dtype).requires_grad_();
    p.weight = (p.weight.detach() * 0.3).to(dtype).requires_grad_();
    const double unit = dtype == at::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
    const auto expected = reference(p);
    const auto result =
        gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets, rows_at_a_time(20, p)));
    EXPECT_EQ(result.loss.scalar_type(), at::kFloat);
    EXPECT_EQ(result.hidden.scalar_type(), dtype);
    EXPECT_NEAR(result.loss.item<double>(), expected.loss.item<double>(), 2 * unit);
    EXPECT_LT(error(result.hidden, expected.hidden), 2 * unit);
    EXPECT_LT(error(result.weight, expected.weight), 2 * unit);
  }
}

TEST(LinearCrossEntropy, AppliesTheIncomingGradient) {
  const auto p = problem(6, 8, 20);
  const auto expected = reference(p, 0.25);
  const auto result = gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets) * 0.25);
  EXPECT_LT(error(result.hidden, expected.hidden), 1e-6);
  EXPECT_LT(error(result.weight, expected.weight), 1e-6);
}

TEST(LinearCrossEntropy, ComputesOnlyTheGradientsAskedFor) {
  auto p = problem(6, 8, 20);
  const auto expected = reference(p);
  p.weight = p.weight.detach();
  linear_cross_entropy(p.hidden, p.weight, p.targets).backward();
  EXPECT_LT(error(p.hidden.grad(), expected.hidden), 1e-6);
  EXPECT_FALSE(p.weight.grad().defined());

  auto q = problem(6, 8, 20);
  q.hidden = q.hidden.detach();
  linear_cross_entropy(q.hidden, q.weight, q.targets).backward();
  EXPECT_LT(error(q.weight.grad(), expected.weight), 1e-6);
  EXPECT_FALSE(q.hidden.grad().defined());

  torch::NoGradGuard no_grad;
  const auto loss = linear_cross_entropy(p.hidden, p.weight, p.targets);
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_NEAR(loss.item<double>(), expected.loss.item<double>(), 1e-5);
}

TEST(LinearCrossEntropy, GivesTheSameBitsWhereTheWeightsGradientIsMadeInBackward) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t rows : {7, 20}) {
      for (const bool frozen : {false, true}) {
        auto p = problem(20, 24, 2 * kTileRows + 5, dtype);
        p.targets[3] = kIgnoredTarget;
        p.hidden.requires_grad_(!frozen);
        const auto bias = at::randn({p.weight.size(0)}).to(dtype).requires_grad_();
        auto options = rows_at_a_time(rows, p);
        options.bias = bias;
        const auto run = [&](bool in_backward) {
          options.weight_in_backward = in_backward;
          for (const auto& tensor : {p.hidden, p.weight, bias})
            tensor.mutable_grad() = at::Tensor();
          const auto loss = linear_cross_entropy(p.hidden, p.weight, p.targets, options);
          (loss * 0.3).backward();
          std::vector<at::Tensor> results{loss.detach(), p.weight.grad(), bias.grad()};
          if (!frozen) results.push_back(p.hidden.grad());
          EXPECT_ANY_THROW(loss.backward());
          return results;
        };
        const auto before = run(false);
        const auto later = run(true);
        for (size_t i = 0; i < before.size(); ++i)
          EXPECT_TRUE(at::equal(later[i], before[i])) << dtype << " " << rows << " " << i;
      }
    }
  }
}

TEST(LinearCrossEntropy, AddsToOtherGradientsOfTheSameWeight) {
  // As a tied embedding does.
  const auto p = problem(6, 8, 20);
  const auto expected = reference(p);
  const auto result =
      gradients(p, linear_cross_entropy(p.hidden, p.weight, p.targets) + p.weight.sum());
  EXPECT_LT(error(result.weight, expected.weight + 1), 1e-6);
}

TEST(LinearCrossEntropy, RefusesASecondBackwardAndASecondDerivative) {
  const auto p = problem(6, 8, 20);
  auto loss = linear_cross_entropy(p.hidden, p.weight, p.targets);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(loss.backward(), Error);
  auto other = linear_cross_entropy(p.hidden, p.weight, p.targets);
  EXPECT_THROW(other.backward({}, /*retain_graph=*/true, /*create_graph=*/true), Error);
}

TEST(LinearCrossEntropy, RefusesWhatDoesNotFit) {
  const auto p = problem(6, 8, 20);
  EXPECT_THROW(linear_cross_entropy(p.hidden, at::zeros({20, 7}), p.targets), ConfigError);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, at::zeros({5}, at::kLong)), ConfigError);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, at::zeros({6}, at::kInt)), ConfigError);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight.to(at::kBFloat16), p.targets), ConfigError);
  EXPECT_THROW(linear_cross_entropy(p.hidden.to(at::kDouble), p.weight.to(at::kDouble), p.targets),
               ConfigError);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets, {.logits_bytes = -1}),
               ConfigError);
  const auto slot = at::ones({3});
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets, {.weight_slot = slot}),
               ConfigError);
  EXPECT_EQ(slot.numel(), 3);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, at::full({6}, 20, at::kLong)), DataError);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, at::full({6}, -1, at::kLong)), DataError);
}

TEST(SoftmaxCrossEntropy, KernelEqualsReference) {
  at::manual_seed(3);
  double smoothing = 0;
  for (const int64_t vocabulary : {1, 2, 7, 8, 31, 64, 1003}) {
    for (const double spread : {0.1, 10.0, 300.0}) {
      const auto logits = at::randn({5, vocabulary}) * spread;
      smoothing = 0.3 - smoothing;  // of every other one
      auto targets = at::randint(vocabulary, {5}, at::kLong);
      auto scale = at::full({5}, 0.2);
      targets[2] = kIgnoredTarget;
      scale[2] = 0;
      auto fast = logits.clone();
      auto plain = logits.clone();
      const auto loss = softmax_cross_entropy_(fast, targets, scale, true, smoothing);
      const auto expected =
          softmax_cross_entropy_reference_(plain, targets, scale, true, smoothing);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(),
                  1e-5 * std::max(1.0, expected.item<double>()))
          << vocabulary << " " << spread;
      EXPECT_LT((fast - plain).abs().max().item<float>(), 1e-6F);
      auto unread = logits.clone();
      EXPECT_EQ(softmax_cross_entropy_(unread, targets, scale, false, smoothing).item<double>(),
                loss.item<double>());
    }
  }
}

TEST(SoftmaxCrossEntropy, OfLowPrecisionIsThatOfTheSameRowsInFp32Rounded) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t rows : {1, 4, 23}) {  // fewer and more than are converted at a time
      at::manual_seed(rows);
      const auto logits = at::randn({rows, 101}).mul_(3).to(dtype);
      auto targets = at::randint(101, {rows}, at::kLong);
      targets[rows / 2] = kIgnoredTarget;
      const auto scale = targets.ne(kIgnoredTarget).to(at::kFloat).div_(rows);
      auto low = logits.clone();
      auto high = logits.to(at::kFloat);
      EXPECT_EQ(softmax_cross_entropy_(low, targets, scale, true).item<double>(),
                softmax_cross_entropy_(high, targets, scale, true).item<double>());
      EXPECT_TRUE(at::equal(low, high.to(dtype)));
      auto apart = logits.t().contiguous().t();  // not contiguous
      softmax_cross_entropy_(apart, targets, scale, true);
      EXPECT_TRUE(at::equal(apart, low));
    }
  }
}

TEST(SoftmaxCrossEntropy, ALogitThatIsNotFiniteShowsInTheLoss) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const int64_t where : {0, 9, 18}) {  // in a vector, in another, in the tail
      auto logits = at::zeros({1, 19});
      logits[0][where] = bad;
      const auto loss =
          softmax_cross_entropy_(logits, at::full({1}, 3, at::kLong), at::ones({1}), true);
      EXPECT_TRUE(std::isnan(loss.item<double>())) << bad << " at " << where;
      EXPECT_TRUE(logits.isnan().all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace zero
