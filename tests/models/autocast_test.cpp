// libzero's own layers, and its models, under autocast.
#include "zero/base/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <optional>

#include "zero/base/error.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/linear.h"

namespace zero {
namespace {

double error(const at::Tensor& value, const at::Tensor& expected) {
  const auto difference = (value.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>();
  return difference / std::max(1e-30, expected.to(at::kDouble).norm().item<double>());
}

struct AutocastResult {
  at::Tensor y, x, weight, bias;
};

// A layer's output, and the gradients of what went in.
template <class Layer>
AutocastResult pass(const Layer& layer, std::optional<at::ScalarType> dtype) {
  at::manual_seed(3);
  auto x = at::randn({6, 20}).requires_grad_();
  auto weight = at::randn({17, 20}).requires_grad_();
  auto bias = at::randn({17}).requires_grad_();
  const auto y = [&] {
    const Autocast casts(dtype);
    return layer(x, weight, bias);
  }();
  (y.to(at::kFloat) * at::linspace(-1, 1, y.numel()).view(y.sizes())).sum().backward();
  return {y.detach(), x.grad(), weight.grad(), bias.grad()};
}

TEST(Autocast, IsAScopeThatEndsAsItBegan) {
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  {
    const Autocast casts(at::kBFloat16);
    EXPECT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kBFloat16);
    {
      const Autocast none(std::nullopt);
      EXPECT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kFloat);
    }
    const Autocast half(at::kHalf);
    EXPECT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kHalf);
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_THROW(Autocast{at::kDouble}, Error);
  EXPECT_THROW(Autocast(at::kBFloat16, at::kXPU), Error);
  EXPECT_EQ(autocast_dtype(at::ones({1})), std::nullopt);
  const Autocast casts(at::kBFloat16);
  EXPECT_EQ(autocast_dtype(at::ones({1})), at::kBFloat16);
  EXPECT_EQ(autocast_dtype(at::ones({1}, at::kDouble)), std::nullopt);
}

TEST(Autocast, ALinearLayerIsLibTorchsOwnToTheLastBit) {
  const auto ours = [](const auto& x, const auto& weight, const auto& bias) {
    return linear(x, weight, bias);
  };
  const auto libtorch = [](const auto& x, const auto& weight, const auto& bias) {
    return at::linear(x, weight, bias);
  };
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto mine = pass(ours, dtype);
    const auto expected = pass(libtorch, dtype);
    EXPECT_EQ(mine.y.scalar_type(), dtype);
    for (const auto* gradient : {&mine.x, &mine.weight, &mine.bias})
      EXPECT_EQ(gradient->scalar_type(), at::kFloat);
    if (dtype == at::kBFloat16) {
      EXPECT_TRUE(mine.y.equal(expected.y));
      EXPECT_TRUE(mine.x.equal(expected.x));
      EXPECT_TRUE(mine.weight.equal(expected.weight));
    }
    const double tolerance = dtype == at::kHalf ? 2e-3 : 1e-2;
    EXPECT_LT(error(mine.y, expected.y), tolerance);
    EXPECT_LT(error(mine.x, expected.x), tolerance);
    EXPECT_LT(error(mine.weight, expected.weight), tolerance);
    EXPECT_LT(error(mine.bias, expected.bias), tolerance);
    EXPECT_GT(error(mine.y, pass(ours, std::nullopt).y), 1e-5) << "it has cast";
  }
}

TEST(Autocast, WithoutItDtypesMustBeOne) {
  const auto low = at::ones({2, 3}, at::kBFloat16);
  const auto weight = at::ones({4, 3});
  EXPECT_THROW(linear(low, weight, at::Tensor()), ConfigError);
  EXPECT_THROW(gelu_linear(low, weight, at::Tensor()), ConfigError);
  EXPECT_THROW(linear(at::ones({2, 3}), weight, at::ones({4}, at::kDouble)), ConfigError);
  EXPECT_THROW(linear(at::ones({2, 3}, at::kLong), weight, at::Tensor()), ConfigError);
  const Autocast casts(at::kBFloat16);
  EXPECT_EQ(linear(low, weight, at::Tensor()).scalar_type(), at::kBFloat16);
  EXPECT_THROW(linear(low, weight.to(at::kDouble), at::Tensor()), ConfigError);
  EXPECT_THROW(linear_cross_entropy(low, weight.to(at::kDouble), at::arange(2)), ConfigError);
}

TEST(Autocast, GeluAndTheLossFollow) {
  const auto gelu = [](const auto& x, const auto& weight, const auto& bias) {
    return gelu_linear(x, weight, bias);
  };
  const auto loss = [](const auto& x, const auto& weight, const auto&) {
    return linear_cross_entropy(x, weight, at::arange(6));
  };
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kHalf ? 5e-3 : 3e-2;
    const auto cast = pass(gelu, dtype);
    const auto whole = pass(gelu, std::nullopt);
    EXPECT_EQ(cast.y.scalar_type(), dtype);
    EXPECT_LT(error(cast.y, whole.y), tolerance);
    EXPECT_LT(error(cast.x, whole.x), tolerance);
    EXPECT_LT(error(cast.weight, whole.weight), tolerance);
    EXPECT_LT(error(cast.bias, whole.bias), tolerance);
    const auto low = pass(loss, dtype);
    const auto high = pass(loss, std::nullopt);
    EXPECT_EQ(low.y.scalar_type(), at::kFloat);
    EXPECT_EQ(low.weight.scalar_type(), at::kFloat);
    EXPECT_LT(error(low.y, high.y), tolerance);
    EXPECT_LT(error(low.x, high.x), tolerance);
    EXPECT_LT(error(low.weight, high.weight), tolerance);
  }
}

TEST(Autocast, OfGpt2KeepsResidualsInFp32AndWeightsUncopied) {
  Gpt2Config sizes;
  sizes.layers = 2;
  sizes.width = 32;
  sizes.heads = 2;
  sizes.context = 16;
  sizes.vocab_size = 64;
  sizes.set_dropout(0);
  at::manual_seed(1);
  Gpt2 model(sizes);
  const auto tokens = at::arange(32).view({2, 16});
  const auto pass = [&](std::optional<at::ScalarType> dtype) {
    model->zero_grad();
    const auto loss = [&] {
      const Autocast casts(dtype);
      return model->loss(tokens, tokens.roll(1, 1));
    }();
    loss.backward();
    std::vector<at::Tensor> all{loss.detach()};
    for (const auto& p : model->parameters()) all.push_back(p.grad().clone());
    return all;
  };
  const auto whole = pass(std::nullopt);
  for (const int64_t every : {0, 1}) {
    model->recompute({.every = every});
    const auto cast = pass(at::kBFloat16);
    ASSERT_EQ(cast.size(), whole.size());
    EXPECT_NE(cast[0].item<float>(), whole[0].item<float>());
    EXPECT_LT(error(cast[0], whole[0]), 1e-3);
    for (size_t i = 1; i < cast.size(); ++i) {
      EXPECT_EQ(cast[i].scalar_type(), at::kFloat);
      EXPECT_LT(error(cast[i], whole[i]), 5e-2) << model->named_parameters()[i - 1].key();
    }
  }
  const Autocast casts(at::kBFloat16);
  EXPECT_EQ(model->forward(tokens).scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace zero
