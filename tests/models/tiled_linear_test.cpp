// Tiled linear layers against whole ones.
#include "zero/models/layers/tiled_linear.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/linear.h"

namespace zero {
namespace {

namespace nn = torch::nn;
using testing::ElementsAre;
using testing::HasSubstr;

at::Tensor input(at::IntArrayRef sizes) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.37).view(sizes);
}

// LibTorch's Sequential cannot hold another one, whose forward is a template.
struct Chain : nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return SequentialImpl::forward(x); }
};

struct Splits {
  int64_t in, out;
};
class TiledLinearTest : public testing::TestWithParam<Splits> {};
INSTANTIATE_TEST_SUITE_P(All, TiledLinearTest,
                         testing::Values(Splits{1, 1}, Splits{1, 3}, Splits{4, 1}, Splits{3, 5},
                                         Splits{23, 31}),
                         [](const auto& info) {
                           return std::to_string(info.param.in) + "x" +
                                  std::to_string(info.param.out);
                         });

TEST_P(TiledLinearTest, EqualsTheWholeLayerInForwardAndBackward) {
  const auto [in_splits, out_splits] = GetParam();
  for (const bool bias : {true, false}) {
    at::manual_seed(1);
    nn::Linear whole(nn::LinearOptions(23, 31).bias(bias));
    TiledLinear tiled(TiledLinearOptions{23, 31, in_splits, out_splits, bias});
    tiled->load(whole->weight, whole->bias);
    EXPECT_EQ(tiled->weights.size(), static_cast<size_t>(in_splits * out_splits));
    EXPECT_TRUE(at::equal(tiled->full_weight(), whole->weight));
    EXPECT_EQ(tiled->full_bias().defined(), bias);
    if (bias) {
      EXPECT_TRUE(at::equal(tiled->full_bias(), whole->bias));
    }

    for (const auto& x : {input({5, 23}), input({2, 3, 23}), input({23})}) {
      const auto a = x.clone().requires_grad_();
      const auto b = x.clone().requires_grad_();
      const auto y = whole(a);
      const auto z = tiled(b);
      EXPECT_EQ(y.sizes(), z.sizes());
      EXPECT_TRUE(at::allclose(y, z, 1e-6, 1e-6));
      at::cos(y).sum().backward();
      at::cos(z).sum().backward();
      EXPECT_TRUE(at::allclose(a.grad(), b.grad(), 1e-5, 1e-6));
    }
    // The tiles' gradients make the whole one: collected as the weights are.
    TiledLinear gradients(TiledLinearOptions{23, 31, in_splits, out_splits, bias});
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < tiled->weights.size(); ++i)
      gradients->weights[i].copy_(tiled->weights[i].grad());
    EXPECT_TRUE(at::allclose(gradients->full_weight(), whole->weight.grad(), 1e-5, 1e-6));
    for (size_t i = 0; i < tiled->biases.size(); ++i)
      gradients->biases[i].copy_(tiled->biases[i].grad());
    if (bias) {
      EXPECT_TRUE(at::allclose(gradients->full_bias(), whole->bias.grad(), 1e-5, 1e-6));
    }
  }
}

TEST(TiledLinear, SplitsAsEvenlyAsPossible) {
  TiledLinear tiled(TiledLinearOptions{7, 10, 3, 4});
  std::vector<int64_t> rows;
  std::vector<int64_t> columns;
  for (int o = 0; o < 4; ++o) rows.push_back(tiled->weights[static_cast<size_t>(o) * 3].size(0));
  for (size_t i = 0; i < 3; ++i) columns.push_back(tiled->weights[i].size(1));
  EXPECT_THAT(rows, ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(columns, ElementsAre(3, 2, 2));
  EXPECT_EQ(tiled->named_parameters().keys().front(), "weight_0_0");
  EXPECT_EQ(tiled->named_parameters().keys().back(), "bias_3");
}

TEST(TiledLinear, TilesOfTheOutputAloneAreTheSameProducts) {
  TiledLinear tiled(TiledLinearOptions{64, 96, 1, 3});
  const auto x = input({8, 64});
  std::vector<at::Tensor> parts;
  for (size_t o = 0; o < 3; ++o)
    parts.push_back(zero::linear(x, tiled->weights[o], tiled->biases[o]));
  EXPECT_TRUE(at::equal(tiled(x), at::cat(parts, -1)));
}

TEST(TiledLinear, Clones) {
  TiledLinear tiled(TiledLinearOptions{7, 10, 3, 4});
  const auto clone = std::dynamic_pointer_cast<TiledLinearImpl>(tiled->clone());
  EXPECT_TRUE(at::equal(clone->full_weight(), tiled->full_weight()));
  const at::NoGradGuard no_grad;
  clone->weights[0].zero_();
  EXPECT_FALSE(at::equal(clone->full_weight(), tiled->full_weight()));
}

TEST(TiledLinear, WrongInputIsNamed) {
  EXPECT_THAT(message_of<ConfigError>([] {
                TiledLinear(TiledLinearOptions{0, 3});
              }),
              HasSubstr("in_features is 0"));
  EXPECT_THAT(message_of<ConfigError>([] {
                TiledLinear(TiledLinearOptions{3, 3, 1, 4});
              }),
              HasSubstr("out_splits is 4; it must be from 1 to out_features, which is 3"));
  TiledLinear tiled(TiledLinearOptions{3, 4, 2, 2});
  EXPECT_THAT(message_of<ConfigError>([&] {
                tiled(input({2, 4}));
              }),
              HasSubstr("3 input features was given (2, 4)"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                tiled->load(input({3, 4}), input({4}));
              }),
              HasSubstr("weight (3, 4) and a bias (4)"));
  EXPECT_THAT(message_of<ConfigError>([&] { tiled->load(input({4, 3})); }), HasSubstr("bias none"));
}

TEST(TileLinears, ReplacesTheLargeLayersOfASequence) {
  at::manual_seed(3);
  nn::Sequential net(nn::Linear(9, 40), nn::Tanh(),
                     std::make_shared<Chain>(nn::Linear(40, 30), nn::Tanh()), nn::Linear(30, 2));
  net->eval();
  const at::NoGradGuard no_grad;  // a graph would hold the weights
  const auto x = input({4, 9});
  const auto before = net->forward(x);
  const auto names = tile_linears(*net, 300);
  EXPECT_THAT(names, ElementsAre("0", "2.0"));
  EXPECT_TRUE(at::allclose(net->forward(x), before, 1e-6, 1e-6));
  std::vector<std::string> parameters;
  for (const auto& item : net->named_parameters()) {
    parameters.push_back(item.key());
    EXPECT_LE(item.value().numel(), 300) << item.key();
  }
  EXPECT_THAT(parameters, testing::Contains("0.weight_1_0"));
  EXPECT_EQ(net->ptr<TiledLinearImpl>(0)->options().out_splits, 2);  // 33 rows of 9 would do
  EXPECT_EQ(net->ptr<TiledLinearImpl>(0)->options().in_splits, 1);
  EXPECT_FALSE(net->ptr<TiledLinearImpl>(0)->is_training());
  EXPECT_THAT(tile_linears(*net, 300), ElementsAre()) << "nothing is left";
}

TEST(TileLinears, KeepsDtypeTrainabilityAndMissingBias) {
  nn::Sequential net(nn::Linear(nn::LinearOptions(16, 16).bias(false)));
  net->to(at::kBFloat16);
  for (auto& p : net->parameters()) p.set_requires_grad(false);
  const auto weight = net->parameters().front().clone();
  tile_linears(*net, 5);  // less than a row
  const auto tiled = net->ptr<TiledLinearImpl>(0);
  EXPECT_TRUE(at::equal(tiled->full_weight(), weight));
  for (const auto& p : net->parameters()) {
    EXPECT_FALSE(p.requires_grad());
    EXPECT_EQ(p.scalar_type(), at::kBFloat16);
    EXPECT_LE(p.numel(), 5);
  }
}

TEST(TileLinears, ReplacesAChildThatIsLookedUpByName) {
  struct Parent : nn::Module {
    Parent() { register_module("fc", std::make_shared<nn::LinearImpl>(8, 8)); }
  } parent;
  EXPECT_THAT(tile_linears(parent, 20), ElementsAre("fc"));
  EXPECT_NE(parent.named_children()["fc"]->as<TiledLinear>(), nullptr);
}

TEST(TileLinears, ALayerInTwoPlacesStaysOneLayer) {
  nn::Sequential net(std::make_shared<Chain>(nn::Linear(8, 8)), std::make_shared<Chain>());
  net->ptr<Chain>(1)->push_back(net->ptr<Chain>(0)->ptr<nn::LinearImpl>(0));
  EXPECT_EQ(tile_linears(*net, 32).size(), 2u);
  EXPECT_EQ(net->ptr<Chain>(0)->ptr(0), net->ptr<Chain>(1)->ptr(0));
  EXPECT_EQ(net->forward(input({2, 8})).size(1), 8);
}

TEST(TileLinears, SplitsTheLayersOfAGpt2) {
  at::manual_seed(5);
  Gpt2 whole(Gpt2Config{.vocab_size = 61, .context = 12, .width = 24, .layers = 2, .heads = 4});
  const auto copy = std::dynamic_pointer_cast<Gpt2Impl>(whole->clone());
  EXPECT_THAT(tile_linears(*copy, 600),
              ElementsAre("h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.1.attn.c_attn",
                          "h.1.mlp.c_fc", "h.1.mlp.c_proj"))
      << "attn.c_proj has 576";
  EXPECT_THAT(tile_linears(*copy, 600), ElementsAre()) << "nothing is left";
  // Cloned again, as models are to be replicated.
  const auto tiled = std::dynamic_pointer_cast<Gpt2Impl>(copy->clone());
  EXPECT_EQ(tiled->named_parameters().keys(), copy->named_parameters().keys());
  const auto names = tiled->named_parameters().keys();
  EXPECT_THAT(names, testing::Contains("h.1.mlp.c_fc.tiles.weight_3_0"));
  EXPECT_THAT(names, testing::Not(testing::Contains("h.1.mlp.c_fc.weight")));
  for (const auto& item : tiled->named_parameters()) {
    if (!item.key().starts_with("w")) {  // the embeddings
      EXPECT_LE(item.value().numel(), 600) << item.key();
    }
  }

  const auto x = at::randint(61, {2, 9}, at::kLong);
  const auto y = at::randint(61, {2, 9}, at::kLong);
  const auto loss = whole->loss(x, y);
  const auto same = tiled->loss(x, y);
  EXPECT_NEAR(same.item<float>(), loss.item<float>(), 1e-5);
  loss.backward();
  same.backward();
  const auto& layer = whole->h->ptr<Gpt2BlockImpl>(1)->mlp->c_proj;
  const auto& tiles = tiled->h->ptr<Gpt2BlockImpl>(1)->mlp->c_proj->tiles;
  TiledLinear gradients(tiles->options());
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < tiles->weights.size(); ++i)
      gradients->weights[i].copy_(tiles->weights[i].grad());
  }
  EXPECT_TRUE(at::allclose(gradients->full_weight(), layer->weight.grad().t(), 1e-4, 1e-7));
  EXPECT_TRUE(at::allclose(tiled->wte->weight.grad(), whole->wte->weight.grad(), 1e-4, 1e-6));
}

TEST(TileLinears, ALayerThatItCannotReplaceIsNamedAndNothingIsChanged) {
  struct Parent : nn::Module {
    Parent()
        : list(register_module("list", nn::Sequential(nn::Linear(8, 8)))),
          fc(register_module("fc", nn::Linear(8, 8))) {}
    nn::Sequential list;
    nn::Linear fc;
  };
  nn::Sequential net;
  net->register_module("model", std::make_shared<Parent>());
  EXPECT_THAT(message_of<ConfigError>([&] { tile_linears(*net, 20); }),
              HasSubstr("'model.fc' cannot be tiled"));
  EXPECT_EQ(net->named_parameters().keys(),
            (std::vector<std::string>{"model.list.0.weight", "model.list.0.bias", "model.fc.weight",
                                      "model.fc.bias"}));
  nn::ModuleList modules(nn::Linear(8, 8));
  EXPECT_THAT(message_of<ConfigError>([&] { tile_linears(*modules, 20); }),
              HasSubstr("'0' cannot be tiled"));
  nn::Linear root(8, 8);
  EXPECT_THAT(message_of<ConfigError>([&] { tile_linears(*root, 20); }),
              HasSubstr("has no parent"));
  EXPECT_THAT(message_of<ConfigError>([&] { tile_linears(*net, -1); }),
              HasSubstr("tiles of -1 elements"));
  EXPECT_THAT(tile_linears(*net, 0), ElementsAre()) << "no tiles are wanted";
  nn::Sequential tied(nn::Linear(8, 8), nn::Linear(8, 8));
  tied->ptr<nn::LinearImpl>(1)->weight = tied->ptr<nn::LinearImpl>(0)->weight;
  EXPECT_THAT(message_of<ConfigError>([&] { tile_linears(*tied, 20); }),
              HasSubstr("weight is shared"));
}

}  // namespace
}  // namespace zero
