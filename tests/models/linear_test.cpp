#include "zero/models/layers/linear.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <tuple>

#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/models/layers/feed_forward.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/matmul.h"

namespace zero {
namespace {

double linear_error(const at::Tensor& value, const at::Tensor& expected) {
  const auto difference = (value.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>();
  return difference / std::max(1e-30, expected.to(at::kDouble).norm().item<double>());
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes).to(dtype);
}

TEST(Product, EqualsTheReferenceWhateverTheStrides) {
  at::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
    for (const auto [m, k, n] : {std::array<int64_t, 3>{3, 5, 7},
                                 {1, 1, 1},
                                 {256, 130, 513},
                                 {1, 2048, 1024},
                                 {2048, 1024, 1},
                                 {0, 4, 5},
                                 {300, 7, 5001}}) {
      const auto a = random({m, k}, dtype);
      const auto b = random({k, n}, dtype);
      const auto bias = random({n}, dtype);
      const auto expected = a.to(at::kDouble).mm(b.to(at::kDouble));
      const auto a_by_columns = a.t().contiguous().t();
      const auto b_by_columns = b.t().contiguous().t();
      const auto b_of_a_wider = random({k, n + 3}, dtype).narrow(1, 0, n).copy_(b);
      for (const auto& left : {a, a_by_columns}) {
        for (const auto& right : {b, b_by_columns, b_of_a_wider}) {
          EXPECT_LT(linear_error(product(left, right), expected), tolerance)
              << m << ' ' << k << ' ' << n;
          EXPECT_LT(linear_error(product(left, right, bias), expected + bias), tolerance);
          EXPECT_LT(linear_error(product_reference(left, right, bias), expected + bias), tolerance);
          auto into = at::empty({n, m}, dtype).t();
          product_into(into, left, right);
          EXPECT_LT(linear_error(into, expected), tolerance);
          add_product(into, left, right);
          EXPECT_LT(linear_error(into, 2 * expected), 2 * tolerance);
        }
      }
    }
  }
}

TEST(Product, IsTheSameEveryTime) {
  const auto a = random({257, 300});
  const auto b = random({300, 511});
  const auto first = product(a, b);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(first, product(a, b)));
}

struct Layer {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
};

Layer layer(WeightLayout layout, at::ScalarType dtype, bool biased) {
  const int64_t in = 96;
  const int64_t out = 200;
  const auto sizes = layout == WeightLayout::in_out ? std::vector<int64_t>{in, out}
                                                    : std::vector<int64_t>{out, in};
  return {random({2, 70, in}, dtype).requires_grad_(), random(sizes, dtype).requires_grad_(),
          biased ? random({out}, dtype).requires_grad_() : at::Tensor()};
}

at::Tensor plain(const Layer& l, WeightLayout layout) {
  return at::linear(l.x, layout == WeightLayout::in_out ? l.weight.t() : l.weight,
                    l.bias.defined() ? std::optional(l.bias) : std::nullopt);
}

std::vector<at::Tensor> gradients(const Layer& l, const at::Tensor& y) {
  std::vector<at::Tensor> of{l.x, l.weight};
  if (l.bias.defined()) of.push_back(l.bias);
  for (const auto& tensor : of) tensor.mutable_grad() = at::Tensor();
  (y * at::arange(y.numel(), y.options()).view(y.sizes()).sin()).sum().backward();
  std::vector<at::Tensor> result;
  for (const auto& tensor : of) result.push_back(tensor.grad().clone());
  return result;
}

TEST(Linear, EqualsLibTorchsForwardAndBackward) {
  at::manual_seed(2);
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const bool biased : {true, false}) {
        const auto l = layer(layout, dtype, biased);
        const auto y = linear(l.x, l.weight, l.bias, layout);
        const auto expected = plain(l, layout);
        const double tolerance = dtype == at::kBFloat16 ? 1e-2 : 1e-6;
        ASSERT_EQ(y.sizes(), expected.sizes());
        EXPECT_LT(linear_error(y, expected), tolerance);
        const auto mine = gradients(l, y);
        const auto theirs = gradients(l, expected);
        for (size_t i = 0; i < mine.size(); ++i)
          EXPECT_LT(linear_error(mine[i], theirs[i]), tolerance);
      }
    }
  }
}

TEST(GeluLinear, EqualsGeluThenLinearBitForBit) {
  at::manual_seed(3);
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const bool biased : {true, false}) {
        const auto l = layer(layout, dtype, biased);
        const auto y = gelu_linear(l.x, l.weight, l.bias, layout);
        const auto expected = linear(tanh_gelu(l.x), l.weight, l.bias, layout);
        EXPECT_TRUE(at::equal(y, expected));
        const auto mine = gradients(l, y);
        const auto theirs = gradients(l, expected);
        for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], theirs[i]));
      }
    }
  }
}

TEST(GeluLinear, SaysThatItHasNoSecondDerivative) {
  const auto l = layer(WeightLayout::out_in, at::kFloat, true);
  EXPECT_THROW(torch::autograd::grad({gelu_linear(l.x, l.weight, l.bias).sum()}, {l.x}, {},
                                     std::nullopt, /*create_graph=*/true),
               Error);
}

// The operators of Note [Epilogues of products], beside what autograd makes of their parts in fp64.
TEST(FeedForward, HasOperatorsThatEqualTheirPartsAndTheirDerivatives) {
  using OptionalTensor = std::optional<at::Tensor>;
  using Forward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                     const OptionalTensor&, bool);
  using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const OptionalTensor&, bool);
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto forward = dispatcher.findSchemaOrThrow("zero::linear_gelu", "").typed<Forward>();
  const auto backward =
      dispatcher.findSchemaOrThrow("zero::linear_gelu_backward", "").typed<Backward>();
  at::manual_seed(4);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const double tolerance = dtype == at::kBFloat16 ? 1e-2 : dtype == at::kHalf ? 2e-3 : 2e-6;
    for (const auto [rows, in, inner, out] :
         {std::array<int64_t, 4>{3, 5, 7, 4}, {1, 8, 16, 8}, {70, 96, 200, 33}, {0, 8, 16, 8}}) {
      for (const bool transposed : {false, true}) {
        for (const bool biased : {false, true}) {
          const auto matrix = [&](int64_t from, int64_t to) {
            return random({transposed ? to : from, transposed ? from : to}, dtype);
          };
          const auto x = random({rows, in}, dtype), dy = random({rows, out}, dtype);
          const auto first = matrix(in, inner), second = matrix(inner, out);
          const auto bias = biased ? OptionalTensor(random({inner}, dtype)) : std::nullopt;

          const auto [h, y] = forward.call(x, first, bias, transposed);
          auto expected_h = x.to(at::kDouble).mm((transposed ? first.t() : first).to(at::kDouble));
          if (bias) expected_h += bias->to(at::kDouble);
          EXPECT_LT(linear_error(h, expected_h), tolerance);
          EXPECT_LT(linear_error(y, at::gelu(h.to(at::kDouble), "tanh")), tolerance);

          const auto h64 = h.to(at::kDouble).clone().requires_grad_();
          at::gelu(h64, "tanh")
              .mm((transposed ? second.t() : second).to(at::kDouble))
              .backward(dy.to(at::kDouble));
          const auto sums =
              biased ? OptionalTensor(at::full({inner}, 7, h.options())) : std::nullopt;
          const auto dh = backward.call(dy, second, h, sums, transposed);
          EXPECT_LT(linear_error(dh, h64.grad()), tolerance);
          if (sums) {
            EXPECT_LT(linear_error(*sums, h64.grad().sum(0)), 2 * tolerance);
          }
        }
      }
    }
  }
}

TEST(FeedForward, EqualsItsLayersBitForBitOnTheCpu) {
  at::manual_seed(5);
  const Epilogues where_there_are_some(EpilogueUse::always);
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto l = layer(layout, dtype, true);
      const auto second = random({200, 200}, dtype).requires_grad_();
      const auto y = feed_forward(l.x, l.weight, l.bias, second, at::Tensor(), layout);
      const auto expected =
          gelu_linear(linear(l.x, l.weight, l.bias, layout), second, at::Tensor(), layout);
      EXPECT_TRUE(at::equal(y, expected));
      const auto mine = gradients(l, y);
      const auto theirs = gradients(l, expected);
      for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], theirs[i]));
    }
  }
}

TEST(Linear, LeavesOutWhatIsFrozen) {
  auto l = layer(WeightLayout::out_in, at::kFloat, true);
  l.weight.set_requires_grad(false);
  linear(l.x, l.weight, l.bias).sum().backward();
  EXPECT_TRUE(l.x.grad().defined());
  EXPECT_TRUE(l.bias.grad().defined());
  EXPECT_FALSE(l.weight.grad().defined());
}

TEST(Linear, HasASecondDerivative) {
  const auto l = layer(WeightLayout::out_in, at::kDouble, false);
  const auto penalty = [&](const at::Tensor& y) {
    const auto g =
        torch::autograd::grad({y.pow(2).sum()}, {l.x}, {}, std::nullopt, /*create_graph=*/true)[0];
    return torch::autograd::grad({g.pow(2).sum()}, {l.weight})[0];
  };
  EXPECT_LT(
      linear_error(penalty(linear(l.x, l.weight, l.bias)), penalty(plain(l, WeightLayout::out_in))),
      1e-12);
}

// Stands for an engine: gives one place, and looks whether the gradient is there.
class Collector final : public torch::autograd::PostAccumulateGradHook, public GradientPlace {
 public:
  explicit Collector(at::Tensor memory) : memory_(std::move(memory)) {}
  at::Tensor place() override {
    return std::exchange(given, true) ? at::Tensor() : memory_.view(memory_.sizes());
  }
  void operator()(const torch::autograd::Variable& variable) override {
    arrived_there = variable.grad().const_data_ptr() == memory_.const_data_ptr();
  }
  bool given = false;
  bool arrived_there = false;

 private:
  at::Tensor memory_;
};

TEST(Linear, WritesTheGradientWhereItIsCollected) {
  const auto l = layer(WeightLayout::in_out, at::kFloat, true);
  auto owned = std::make_unique<Collector>(at::empty(l.weight.sizes()));
  const auto* collector = owned.get();
  torch::autograd::impl::set_post_acc_grad_hooks(l.weight, std::move(owned));
  linear(l.x, l.weight, l.bias, WeightLayout::in_out).sum().backward();
  EXPECT_TRUE(collector->arrived_there);
  torch::autograd::impl::set_post_acc_grad_hooks(l.weight, nullptr);
  const auto once = l.weight.grad().clone();

  // Used twice, the second gradient gets memory of its own, and the sum is right.
  l.weight.mutable_grad() = at::Tensor();
  torch::autograd::impl::set_post_acc_grad_hooks(
      l.weight, std::make_unique<Collector>(at::empty(l.weight.sizes())));
  const auto y = linear(l.x, l.weight, l.bias, WeightLayout::in_out) +
                 linear(l.x, l.weight, l.bias, WeightLayout::in_out);
  y.sum().backward();
  EXPECT_TRUE(at::equal(l.weight.grad(), once * 2));
  torch::autograd::impl::set_post_acc_grad_hooks(l.weight, nullptr);
}

}  // namespace
}  // namespace zero
