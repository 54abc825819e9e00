// A small network and how the engine's tests train it.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <string>
#include <vector>

#include "zero/engine/engine.h"

namespace zero {

namespace nn = torch::nn;

// Three linear layers of uneven sizes: nothing divides by 2, 3 or 4.
struct Net : nn::Module {
  Net()
      : a(register_module("a", nn::Linear(7, 33))),
        b(register_module("b", nn::Linear(33, 29))),
        c(register_module("c", nn::Linear(29, 1))) {
    // Ranks are threads here and share the generator: values that do not need it.
    const torch::NoGradGuard guard;
    double phase = 0.3;
    for (auto& p : parameters())
      p.copy_(torch::sin(torch::arange(p.numel()) * 0.7 + (phase += 1.1)).mul(0.2).view(p.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  nn::Linear a, b, c;
};

// Four weights of 64 x 64: an embedding-free chain of products without biases. One operator in
// forward and one in backward touch each.
struct Chain : nn::Module {
  Chain() {
    for (int i = 0; i < 4; ++i)
      w.push_back(register_parameter(
          "w" + std::to_string(i),
          torch::sin(torch::arange(64 * 64) * (0.3 + i)).mul(0.1).view({64, 64})));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& weight : w) x = torch::mm(x, weight);
    return x;
  }
  std::vector<at::Tensor> w;
};

inline at::Tensor input(int rank, int64_t step, at::ScalarType dtype) {
  return torch::cos(torch::arange(35) * 0.9 + rank * 1.7 + static_cast<double>(step))
      .view({5, 7})
      .to(dtype);
}

inline at::Tensor loss_of(Net& net, int rank, int64_t step) {
  const auto dtype = net.a->weight.scalar_type();
  return (net.forward(input(rank, step, dtype)).to(at::kFloat) - 0.7).pow(2).mean();
}

inline Config config(int stage, bool bf16 = false, int64_t accumulate = 1) {
  Config result;
  result.stage = stage;
  result.bf16 = bf16;
  result.gradient_accumulation_steps = accumulate;
  result.unit_bytes = 1500;
  result.gradient_clipping = 0;
  return result;
}

inline void train(Engine& engine, Net& net, int64_t steps, int64_t first = 0) {
  const int64_t k = engine.config().gradient_accumulation_steps;
  for (int64_t i = first * k; i < (first + steps) * k; ++i) {
    engine.backward(loss_of(net, engine.group().rank(), i));
    engine.step();
  }
}

inline std::vector<at::Tensor> weights(Engine& engine) {
  std::vector<at::Tensor> all;
  for (const auto& name : engine.parameter_names()) all.push_back(engine.parameter(name));
  return all;
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "parameter " << i;
}

}  // namespace zero
