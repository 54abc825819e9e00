#include "tests/compositions/network.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/linear.h"
#include "zero/models/recompute/recompute.h"

namespace zero::compositions {

namespace nn = torch::nn;

namespace {

constexpr int64_t kRows = 3;
constexpr int64_t kWidth = 7;

}  // namespace

const std::vector<std::string_view>& Network::words() {
  static const std::vector<std::string_view> all{
      "none",    "linear",     "wide",   "alone", "conv",     "lstm",   "tied",
      "aliased", "twice",      "frozen", "half",  "unused",   "expert", "turns",
      "table",   "layer_norm", "scalar", "empty", "in_place", "views",  "strided"};
  return all;
}

Network::Network(const std::vector<std::string_view>& words, int expert, int rank,
                 at::ScalarType dtype, bool recomputes)
    : expert_(expert), rank_(rank), dtype_(dtype), recomputes_(recomputes) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "none") blocks_.push_back(make(i, words[i]));
  }
  head_ = weight("head", {1, kWidth});
}

at::Tensor Network::weight(const std::string& name, at::IntArrayRef sizes, bool trained) {
  phase_ += 1.1;
  const auto numel = c10::multiply_integers(sizes);
  const auto values = torch::sin(torch::arange(numel) * 0.7 + phase_).mul(0.3).view(sizes);
  return register_parameter(name, values, trained);
}

Network::Block Network::make(size_t place, std::string_view word) {
  const auto name = [&](const char* last) { return "block" + std::to_string(place) + "_" + last; };
  const auto linear = [](const at::Tensor& w, const at::Tensor& b) -> Block {
    return [=](const at::Tensor& x) { return torch::tanh(at::linear(x, w, b)); };
  };
  if (word == "linear") return linear(weight(name("w"), {7, 7}), weight(name("b"), {7}));
  if (word == "frozen")
    return linear(weight(name("w"), {7, 7}, false), weight(name("b"), {7}, false));
  if (word == "half") return linear(weight(name("w"), {7, 7}, false), weight(name("b"), {7}));
  if (word == "unused") {
    weight(name("w"), {7, 7});
    return [](const at::Tensor& x) { return x; };
  }
  if (word == "wide") {
    const auto in = linear(weight(name("in_w"), {33, 7}), weight(name("in_b"), {33}));
    const auto out = linear(weight(name("out_w"), {7, 33}), weight(name("out_b"), {7}));
    return [=](const at::Tensor& x) { return out(in(x)); };
  }
  if (word == "alone") {  // more than a unit, and a multiple of all slices
    const auto w = weight(name("w"), {768, 7});
    return [=](const at::Tensor& x) { return torch::tanh(torch::mm(at::linear(x, w), w) * 0.05); };
  }
  if (word == "conv") {
    const auto w = weight(name("w"), {4, 1, 3});
    const auto b = weight(name("b"), {4});
    return [=](const at::Tensor& x) {
      return torch::tanh(at::conv1d(x.view({kRows, 1, kWidth}), w, b, 1, 1)).mean(1);
    };
  }
  if (word == "lstm") {
    const auto in = weight(name("in"), {28, 7});
    const auto hidden = weight(name("hidden"), {28, 7});
    return [=](const at::Tensor& x) {
      auto h = torch::zeros({1, kWidth}, x.options().requires_grad(false));
      auto c = h;
      std::vector<at::Tensor> all;
      for (int64_t t = 0; t < kRows; ++t) {
        const auto gates = (at::linear(x.narrow(0, t, 1), in) + at::linear(h, hidden)).chunk(4, 1);
        c = torch::sigmoid(gates[0]) * c + torch::sigmoid(gates[1]) * torch::tanh(gates[2]);
        h = torch::sigmoid(gates[3]) * torch::tanh(c);
        all.push_back(h);
      }
      return torch::cat(all, 0);
    };
  }
  if (word == "tied" || word == "aliased") {
    const auto w = weight(name("w"), {7, 7});
    auto again = w;
    if (word == "aliased") {
      again = torch::empty({7, 7}).requires_grad_();
      again.set_data(w.detach());
    }
    register_parameter(name("again"), again);
    return [=](const at::Tensor& x) {
      return torch::tanh(torch::mm(torch::tanh(torch::mm(x, w)), again.t()));
    };
  }
  if (word == "twice") {
    nn::Linear layer(nn::LinearOptions(7, 7));
    const torch::NoGradGuard no_grad;
    double value = phase_ += 1.1;
    for (const auto& p : layer->parameters())
      p.copy_(torch::cos(torch::arange(p.numel()) + value++).mul(0.3).view(p.sizes()));
    register_module(name("first"), layer);
    register_module(name("second"), layer);
    return [=](const at::Tensor& x) mutable { return torch::tanh(layer(torch::tanh(layer(x)))); };
  }
  if (word == "expert" || word == "turns") {
    const auto one = linear(weight(name("one_w"), {7, 7}), weight(name("one_b"), {7}));
    const auto two = linear(weight(name("two_w"), {7, 7}), weight(name("two_b"), {7}));
    const int shift = word == "expert" ? expert_ : 0;
    return [=, this](const at::Tensor& x) { return (step + shift) % 2 == 0 ? one(x) : two(x); };
  }
  if (word == "table") {
    const auto w = weight(name("w"), {11, 7});
    return [=, this](const at::Tensor& x) {
      const auto rows = torch::arange(kRows) * 2 + (step + rank_) % 5;
      return x + at::embedding(w, rows);
    };
  }
  if (word == "layer_norm") {
    const auto w = weight(name("w"), {7});
    const auto b = weight(name("b"), {7});
    return [=](const at::Tensor& x) { return at::layer_norm(x, {kWidth}, w, b); };
  }
  if (word == "scalar") {
    const auto s = weight(name("s"), {});
    return [=](const at::Tensor& x) { return x * (s + 1); };
  }
  if (word == "empty") {
    const auto none = weight(name("none"), {0});
    return [=](const at::Tensor& x) { return x + none.sum(); };
  }
  if (word == "in_place") {  // its gradients are written where they are added
    const auto w = weight(name("w"), {7, 7});
    const auto b = weight(name("b"), {7});
    return [=](const at::Tensor& x) {
      return torch::tanh(zero::linear(x, w, b, WeightLayout::out_in));
    };
  }
  if (word == "views") {
    const auto w = weight(name("w"), {14, 7});
    return [=](const at::Tensor& x) {
      const auto halves = w.chunk(2);
      return torch::tanh(torch::mm(torch::tanh(torch::mm(x, halves[1])), halves[0]));
    };
  }
  if (word == "strided") {
    phase_ += 1.1;
    const auto values = torch::sin(torch::arange(35) * 0.7 + phase_).mul(0.3).view({5, 7}).t();
    const auto w = register_parameter(name("w"), values);
    return [=](const at::Tensor& x) { return torch::tanh(torch::mm(torch::mm(x, w), w.t())); };
  }
  throw ConfigError("There is no block '" + std::string(word) + "'.");
}

at::Tensor Network::input(int64_t number) const {
  return torch::cos(torch::arange(kRows * kWidth) * 0.9 + rank_ * 1.7 + static_cast<double>(number))
      .view({kRows, kWidth})
      .to(dtype_);
}

at::Tensor Network::loss_of(const at::Tensor& last, bool other) const {
  const auto out = at::linear(last, head_).to(at::kFloat) - 0.7;
  return other ? out.abs().mean() : out.pow(2).mean();
}

at::Tensor Network::loss(int64_t number, bool other) {
  auto x = input(number);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (!skipped(i)) x = recomputes_ ? zero::recompute(blocks_[i], x) : blocks_[i](x);
    if (i == 0 && throws && x.requires_grad())
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw Thrown(); });
  }
  return loss_of(x, other);
}

LayerSequence Network::layers(int64_t first, int64_t count) {
  LayerSequence sequence;
  sequence.inputs = [=, this] {
    std::vector<std::vector<at::Tensor>> all;
    for (int64_t i = 0; i < count; ++i) all.push_back({input(first + i)});
    return all;
  };
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (skipped(i)) continue;
    sequence.layers.emplace_back([block = blocks_[i]](const std::vector<at::Tensor>& x) {
      return std::vector<at::Tensor>{block(x.front())};
    });
  }
  sequence.loss = [this](const std::vector<at::Tensor>& last, int64_t) {
    return loss_of(last.front(), false);
  };
  return sequence;
}

}  // namespace zero::compositions
