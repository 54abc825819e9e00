// Small models of several kinds that tests train, on the CPU and on the simulated device.
#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace zero::simulated {

namespace nn = torch::nn;
using at::Tensor;

struct Learner : nn::Module {
  virtual Tensor loss(const Tensor& x, const Tensor& y) = 0;
};

struct Mlp final : Learner {
  nn::Sequential layers{nn::Linear(16, 32), nn::ReLU(), nn::Linear(32, 32), nn::Tanh(),
                        nn::Linear(32, 8)};
  Mlp() { register_module("layers", layers); }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    return torch::cross_entropy_loss(layers->forward(x), y);
  }
};

struct Block final : nn::Module {
  nn::LayerNorm before_attention, before_mlp;
  nn::Linear qkv, out, up, down;
  nn::Dropout drop;
  explicit Block(int64_t width)
      : before_attention(nn::LayerNormOptions({width})),
        before_mlp(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, 4 * width),
        down(4 * width, width),
        drop(0.1) {
    register_module("before_attention", before_attention);
    register_module("before_mlp", before_mlp);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
    register_module("drop", drop);
  }
  Tensor forward(Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(before_attention(x))
                           .view({batch, length, 3, 4, width / 4})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto seen = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(seen.transpose(1, 2).reshape({batch, length, width}));
    return x + drop(down(torch::gelu(up(before_mlp(x)))));
  }
};

// With dropout, fused attention, and an embedding that is the output's weight too.
struct Gpt final : Learner {
  nn::Embedding tokens{32, 32}, places{16, 32};
  nn::LayerNorm last{nn::LayerNormOptions({32})};
  std::vector<std::shared_ptr<Block>> blocks;
  Gpt() {
    register_module("tokens", tokens);
    register_module("places", places);
    register_module("last", last);
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>(32)));
    }
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    auto h = tokens(x) + places(torch::arange(x.size(1), x.options())).unsqueeze(0);
    for (const auto& block : blocks) h = block->forward(h);
    const auto scores = torch::matmul(last(h), tokens->weight.t());
    return torch::cross_entropy_loss(scores.flatten(0, 1), y.flatten());
  }
};

struct Convolution final : Learner {
  nn::Sequential layers{nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)),
                        nn::BatchNorm2d(8),
                        nn::ReLU(),
                        nn::MaxPool2d(2),
                        nn::Conv2d(nn::Conv2dOptions(8, 8, 3)),
                        nn::GroupNorm(2, 8),
                        nn::Flatten(),
                        nn::Linear(32, 8)};
  Convolution() { register_module("layers", layers); }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    return torch::cross_entropy_loss(layers->forward(x), y);
  }
};

struct Lstm final : Learner {
  nn::LSTM layers{
      nn::LSTMOptions(16, 12).num_layers(2).bidirectional(true).dropout(0.2).batch_first(true)};
  nn::Linear last{24, 8};
  Lstm() {
    register_module("layers", layers);
    register_module("last", last);
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    const auto [output, states] = layers->forward(x);
    const auto& [state, cell] = states;
    return torch::cross_entropy_loss(last(output.select(1, -1)), y) + state.mul(cell).mean();
  }
};

struct Gru final : Learner {
  nn::GRU layers{nn::GRUOptions(16, 12).num_layers(2).bidirectional(true).batch_first(true)};
  nn::Linear last{24, 8};
  Gru() {
    register_module("layers", layers);
    register_module("last", last);
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    const auto [output, state] = layers->forward(x);
    return torch::cross_entropy_loss(last(output.select(1, -1)), y) + state.pow(2).mean();
  }
};

// Step by step, through the cells.
struct Cells final : Learner {
  nn::LSTMCell lstm{16, 12};
  nn::GRUCell gru{12, 8};
  Cells() {
    register_module("lstm", lstm);
    register_module("gru", gru);
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    auto state = torch::zeros({x.size(0), 12}, x.options());
    auto cell = torch::zeros_like(state);
    auto scores = torch::zeros({x.size(0), 8}, x.options());
    for (const auto& now : x.unbind(1)) {
      std::tie(state, cell) = lstm->forward(now, std::make_tuple(state, cell));
      scores = gru->forward(state, scores);
    }
    return torch::cross_entropy_loss(scores, y);
  }
};

template <class Model>
std::shared_ptr<Learner> make() {
  return std::make_shared<Model>();
}

// The models' inputs.
inline Tensor vectors() { return torch::randn({6, 16}); }
inline Tensor images() { return torch::randn({6, 3, 8, 8}); }
inline Tensor sequences() { return torch::randn({6, 5, 16}); }
inline Tensor tokens() { return torch::randint(32, {3, 16}); }
inline Tensor classes() { return torch::randint(8, {6}); }

}  // namespace zero::simulated
