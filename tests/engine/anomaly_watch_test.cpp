// Tests what a watch names, without an engine.
#include "zero/engine/anomaly_watch.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <limits>
#include <memory>
#include <string>

#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/linear.h"
#include "zero/models/recompute/recompute.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor numbers(at::IntArrayRef sizes) {
  return torch::cos(torch::arange(c10::multiply_integers(sizes)) * 0.9).view(sizes);
}

// Two layers and, between them, a function that a test chooses.
struct Between : nn::Module {
  explicit Between(TensorFunction function) : function(std::move(function)) {
    const torch::NoGradGuard guard;
    for (auto& p : parameters()) p.copy_(numbers(p.sizes()).mul(0.3));
  }
  at::Tensor loss(const at::Tensor& x) {
    return second->forward(function({first->forward(x)}).front()).pow(2).mean();
  }
  nn::Linear first{register_module("first", nn::Linear(4, 4))};
  nn::Linear second{register_module("second", nn::Linear(4, 4))};
  TensorFunction function;
};

TEST(AnomalyWatch, InstallsNoCallbackOutsideOfItsScope) {
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(at::hasCallbacks());
  {
    const AnomalyWatch watch;
    EXPECT_TRUE(at::hasThreadLocalCallbacks());
    EXPECT_THAT(message_of<Error>([] { const AnomalyWatch second; }),
                HasSubstr("second zero::AnomalyWatch"));
    EXPECT_TRUE(at::hasThreadLocalCallbacks()) << "the first goes on";
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value())
      << "operators take LibTorch's usual way";
}

TEST(AnomalyWatch, WhatIsFiniteIsNoAnomaly) {
  Between model([](auto x) { return std::vector{torch::tanh(x[0])}; });
  AnomalyWatch watch(model);
  model.loss(numbers({3, 4})).backward();
  EXPECT_FALSE(watch.first());
  EXPECT_FALSE(watch.first_infinity());
  EXPECT_EQ(watch.report(), "");
}

TEST(AnomalyWatch, NamesALogarithmOfNegativeNumbersInForward) {
  Between model([](auto x) { return std::vector{torch::log(x[0])}; });
  AnomalyWatch watch(model);
  const auto x = numbers({3, 4});
  const auto negative = model.first->forward(x).lt(0).sum().item<int64_t>();
  ASSERT_GT(negative, 0);
  model.loss(x).backward();
  ASSERT_TRUE(watch.first());
  const auto& first = *watch.first();
  EXPECT_EQ(first.operation, "aten::log");
  EXPECT_FALSE(first.backward);
  EXPECT_EQ(first.after.substr(0, 5), "first");
  EXPECT_EQ(first.nans, negative);
  EXPECT_EQ(first.elements, 12);
  EXPECT_EQ(first.sizes, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(first.inputs, Anomaly::Inputs::finite);
  EXPECT_THAT(watch.report(),
              AllOf(StartsWith("forward: aten::log after parameter first."),
                    HasSubstr(std::to_string(negative) + " NaN and 0 infinite of 12 elements "
                                                         "(Float, [3, 4]) from finite inputs.")));
  watch.clear();
  EXPECT_FALSE(watch.first());
}

TEST(AnomalyWatch, NamesTheNodeAndItsForwardOperatorInBackward) {
  // The derivative of the square root is infinite at 0, and 0 times that is NaN.
  Between model([](auto x) { return std::vector{torch::sqrt(x[0] * 0) * 0}; });
  AnomalyWatch watch(model);
  model.loss(numbers({3, 4})).backward();
  ASSERT_TRUE(watch.first());
  EXPECT_TRUE(watch.first()->backward);
  EXPECT_EQ(watch.first()->node, "SqrtBackward0");
  EXPECT_EQ(watch.first()->forward_operation, "aten::sqrt");
  EXPECT_EQ(watch.first()->operation, "aten::div");
  EXPECT_EQ(watch.first()->after.substr(0, 5), "first");
  EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::finite) << "0 / 0";
}

TEST(AnomalyWatch, NamesTheParameterOfAnOperatorInBothPasses) {
  for (const bool backward : {false, true}) {
    Between model([](auto x) { return x; });
    {
      const torch::NoGradGuard guard;
      if (!backward) model.second->weight[0][0] = NAN;
    }
    // A gradient that a hook spoils, at the layer that it has passed.
    const auto x = numbers({3, 4});
    AnomalyWatch watch(model);
    auto hidden = model.first->forward(x);
    if (backward) hidden.register_hook([](const at::Tensor& g) { return g * 0 / (g * 0); });
    const auto loss = model.second->forward(hidden).pow(2).mean();
    if (backward) loss.backward();
    ASSERT_TRUE(watch.first());
    EXPECT_EQ(watch.first()->backward, backward);
    if (backward) {
      EXPECT_EQ(watch.first()->operation, "aten::div");
      EXPECT_THAT(watch.first()->node, StartsWith("a hook at AddmmBackward"));
      EXPECT_EQ(watch.first()->forward_operation, "aten::addmm");
      EXPECT_THAT(watch.first()->parameter, StartsWith("first."));
      EXPECT_EQ(watch.first()->nans, 12);
    } else {
      EXPECT_THAT(watch.first()->parameter, StartsWith("second.")) << watch.report();
      EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::nan);
      EXPECT_EQ(watch.first()->input, "second.weight");
    }
  }
}

TEST(AnomalyWatch, AnOverflowIsToldOnceItLeadsToANaN) {
  Between model([](auto x) {
    const auto large = torch::exp(x[0].abs() * 1e4);
    return std::vector{large / large};
  });
  AnomalyWatch watch(model);
  model.loss(numbers({3, 4}));
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->operation, "aten::div");
  EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::infinity);
  ASSERT_TRUE(watch.first_infinity());
  EXPECT_EQ(watch.first_infinity()->operation, "aten::exp");
  EXPECT_GT(watch.first_infinity()->infinities, 0);
  EXPECT_EQ(watch.first_infinity()->nans, 0);
  EXPECT_THAT(watch.report(), AllOf(StartsWith("forward: aten::exp after parameter "),
                                    HasSubstr(" infinite of 12 elements"),
                                    HasSubstr(". The first NaN: forward: aten::div")));
}

TEST(AnomalyWatch, AnOverflowAloneIsToldOnceAGradientIsInfinite) {
  const auto x = torch::full({3}, 60.0).requires_grad_();
  AnomalyWatch watch;
  const auto y = torch::exp(x);
  const auto loss = (y * y).sum();
  EXPECT_FALSE(watch.first()) << "the program may want it";
  ASSERT_TRUE(watch.first_infinity());
  EXPECT_EQ(watch.first_infinity()->operation, "aten::mul");
  y.register_hook([](const at::Tensor& g) { return g * 1e30; });
  loss.backward();
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->operation, "aten::mul");
}

TEST(AnomalyWatch, AMaskOfAttentionIsNone) {
  for (const int way : {0, 1, 2, 3}) {
    const auto x = numbers({2, 2, 5, 8}).requires_grad_();
    const auto upper = torch::ones({5, 5}, at::kBool).triu(1);
    AnomalyWatch watch;
    at::Tensor y;
    if (way == 0) {
      y = torch::softmax(torch::matmul(x, x.transpose(-1, -2)).masked_fill(upper, -kInfinity), -1);
    } else if (way == 1) {
      const auto mask = torch::full({5, 5}, -kInfinity).triu(1);
      y = torch::softmax(torch::matmul(x, x.transpose(-1, -2)) + mask, -1);
    } else if (way == 2) {
      y = at::scaled_dot_product_attention(x, x, x, upper.logical_not());
    } else {
      auto scores = torch::matmul(x, x.transpose(-1, -2));
      scores.masked_fill_(upper, -kInfinity);
      y = torch::log_softmax(scores, -1).exp();
    }
    y.pow(2).sum().backward();
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>()) << way;
    EXPECT_FALSE(watch.first()) << way << ": " << watch.report();
    EXPECT_FALSE(watch.first_infinity()) << way << ": " << watch.first_infinity()->text();
  }
}

TEST(AnomalyWatch, ARowThatIsMaskedWhollyIs) {
  AnomalyWatch watch;
  const auto scores = torch::zeros({2, 3}).masked_fill(torch::ones({2, 3}, at::kBool), -kInfinity);
  torch::softmax(scores, -1);
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->operation, "aten::_softmax");
  EXPECT_EQ(watch.first()->within, "aten::softmax");
  EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::infinity);
}

TEST(AnomalyWatch, OperatorsInPlaceAreJudgedByWhatTheyFound) {
  const auto spoil = [](bool before) {
    auto x = torch::ones({4});
    if (before) x.mutable_data_ptr<float>()[1] = NAN;  // which no operator shows
    AnomalyWatch watch;
    auto part = x.narrow(0, 1, 2);
    before ? part.add_(1) : part.sub_(2).log_();
    return watch.first();
  };
  const auto was = spoil(true);
  ASSERT_TRUE(was);
  EXPECT_EQ(was->operation, "aten::add_");
  EXPECT_EQ(was->inputs, Anomaly::Inputs::nan);
  const auto made = spoil(false);
  ASSERT_TRUE(made);
  EXPECT_EQ(made->operation, "aten::log_");
  EXPECT_EQ(made->inputs, Anomaly::Inputs::finite);
  EXPECT_EQ(made->elements, 2);
}

TEST(AnomalyWatch, OperatorsOfListsInPlaceAreWatched) {
  std::vector<at::Tensor> list{torch::ones({2}), torch::ones({3})};
  AnomalyWatch watch;
  at::_foreach_mul_(list, NAN);
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::nan) << "the number";
}

TEST(AnomalyWatch, MemoryThatNobodyHasWrittenIsNotLookedAt) {
  // Memory that an allocator gives back has the values of before.
  AnomalyWatch watch;
  auto buffer = torch::empty({8});
  std::fill_n(buffer.mutable_data_ptr<float>(), 8, NAN);
  const auto view = buffer.view({2, 4}).t().narrow(0, 0, 1);
  buffer.copy_(torch::ones({8}));
  at::mul_out(buffer, torch::ones({8}), torch::ones({8}));
  EXPECT_FALSE(watch.first()) << watch.report();
}

TEST(AnomalyWatch, RecomputedOperatorsAreForwardOnes) {
  Between model([](auto x) {
    return recompute(
        [](const std::vector<at::Tensor>& inner) {
          // Spoils the second run alone.
          const auto y = torch::tanh(inner[0]);
          return std::vector{at::GradMode::is_enabled() ? torch::log(y.abs() - 2) : y};
        },
        x);
  });
  AnomalyWatch watch(model);
  model.loss(numbers({3, 4})).backward();
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->operation, "aten::log");
  EXPECT_FALSE(watch.first()->backward);
  EXPECT_TRUE(watch.first()->recomputed);
  EXPECT_THAT(watch.report(), StartsWith("forward, recomputed: aten::log"));
}

TEST(AnomalyWatch, LibzerosOwnKernelsAreOperators) {
  const auto x = numbers({3, 4}).requires_grad_();
  const auto weight = numbers({4, 4}).requires_grad_();
  for (const bool backward : {false, true}) {
    const NamedTensors names{{{"h.3.weight", weight}}, {}};
    AnomalyWatch watch(names);
    auto hidden = linear(x, weight, {}, WeightLayout::in_out);
    if (!backward) hidden.mutable_data_ptr<float>()[0] = NAN;
    const auto y = tanh_gelu(hidden);
    if (!backward) {
      ASSERT_TRUE(watch.first());
      EXPECT_EQ(watch.first()->operation, "zero::tanh_gelu");
      EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::nan);
      EXPECT_EQ(watch.first()->after, "h.3.weight");
      continue;
    }
    hidden.register_hook([](const at::Tensor& g) {
      auto spoiled = g.clone();
      spoiled.mutable_data_ptr<float>()[0] = NAN;
      return spoiled;
    });
    y.sum().backward();
    ASSERT_TRUE(watch.first());
    EXPECT_EQ(watch.first()->node, "zero::Linear");
    EXPECT_EQ(watch.first()->parameter, "h.3.weight");
    EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::nan);
  }
}

// A gradient that nobody has seen made.
struct Raw : torch::autograd::Function<Raw> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    auto g = gradients[0].clone();
    g.mutable_data_ptr<float>()[0] = NAN;
    return {g};
  }
};

TEST(AnomalyWatch, AGradientFromWhereNothingIsObservedNamesItsParameter) {
  const auto weight = numbers({4}).requires_grad_();
  AnomalyWatch watch(NamedTensors{{{"h.3.weight", weight}}, {}});
  Raw::apply(weight).sum().backward();
  EXPECT_EQ(watch.report(),
            "backward: the gradient of parameter h.3.weight came with 1 NaN and 0 infinite of 4 "
            "elements (Float, [4]), which no operator that can be observed has made.");
}

TEST(AnomalyWatch, ThrowsAtTheEndOfBackwardWhereAsked) {
  Between model([](auto x) { return std::vector{torch::log(x[0])}; });
  AnomalyWatch watch(model, {.throws = true});
  const auto loss = model.loss(numbers({3, 4}));
  EXPECT_THAT(message_of<NotFinite>([&] { loss.backward(); }), HasSubstr("aten::log"));
  watch.clear();
  torch::ones({2}).requires_grad_().sum().backward();
}

TEST(AnomalyWatch, ParametersInOneStorageAreToldApart) {
  const auto flat = numbers({32});
  const NamedTensors names{
      {{"a", flat.narrow(0, 0, 16).view({4, 4})}, {"b", flat.narrow(0, 16, 16).view({4, 4})}}, {}};
  AnomalyWatch watch(names);
  const auto& b = names.parameters[1].second;
  torch::mm(torch::full({4, 4}, NAN), b.t());
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->within, "aten::full") << "a number that the program gave";
  EXPECT_EQ(watch.first()->inputs, Anomaly::Inputs::nan);
  watch.clear();
  torch::mm(b, b.t() / 0);
  ASSERT_TRUE(watch.first());
  EXPECT_EQ(watch.first()->parameter, "b");
}

}  // namespace
}  // namespace zero
