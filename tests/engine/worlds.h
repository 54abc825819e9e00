// Ranks on one host and on several, which are threads; those of two hosts share memory with their
// host's alone. And a model that is uneven in every way, for comparing what they make of it.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {

struct World {
  int hosts = 1;
  int ranks_a_host = 1;
};
inline constexpr World kTwoByTwo{2, 2};
inline constexpr World kTwoByOne{2, 1};
inline constexpr World kFourByOne{1, 4};

inline void run_in(World world, const std::function<void(std::shared_ptr<comm::Group>)>& body,
                   int block = 0) {
  if (world.hosts == 1) {
    comm::run_as_threads(world.ranks_a_host, body, {.sum_block = block});
  } else {
    comm::run_as_hosts(world.hosts, world.ranks_a_host, body);
  }
}

// A frozen layer, a weight that is used twice under two names, and a layer that only rank 1 uses in
// the first step, unless they go `together`: at stage 3 ranks of several hosts gather together.
struct Uneven : nn::Module {
  Uneven() {
    register_module("net", net);
    register_module("extra", extra);
    register_module("frozen", frozen);
    const torch::NoGradGuard guard;
    for (auto* layer : {&extra, &frozen}) {
      auto weight = (*layer)->weight;
      weight.copy_(torch::cos(torch::arange(weight.numel()) * 0.3).mul(0.1).view(weight.sizes()));
      (*layer)->bias.zero_();
    }
    frozen->weight.requires_grad_(false);
    frozen->bias.requires_grad_(false);
    again = register_parameter("again", extra->weight);
  }
  at::Tensor loss(int rank, int64_t step, bool together) {
    auto x = input(rank, step, frozen->weight.scalar_type());
    if (together || step > 0 || rank == 1) {
      x = torch::tanh(extra(x));
      x = torch::mm(x, again);
    }
    return (net->forward(torch::tanh(frozen(x))).to(at::kFloat) - 0.7).pow(2).mean();
  }
  std::shared_ptr<Net> net = std::make_shared<Net>();
  nn::Linear extra{7, 7};
  nn::Linear frozen{7, 7};
  at::Tensor again;
};

struct Outcome {
  std::vector<float> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
  at::Tensor gradient;
};

// Calls `train(group)` on each rank. Returns what it returns on rank 0: all ranks have the same
// weights and norms.
template <typename Train>
auto train_in(World world, int block, const Train& train) {
  using Result = decltype(train(std::shared_ptr<comm::Group>()));
  std::mutex mutex;
  std::vector<Result> all(static_cast<size_t>(world.hosts * world.ranks_a_host));
  run_in(
      world,
      [&](auto group) {
        auto mine = train(group);
        const std::lock_guard lock(mutex);
        all[static_cast<size_t>(group->rank())] = std::move(mine);
      },
      block);
  for (const auto& other : all) {
    expect_equal(other.weights, all.front().weights);
    EXPECT_EQ(other.norms, all.front().norms);
  }
  return all.front();
}

inline Outcome outcome_of(World world, const Config& c, int block = 0) {
  return train_in(world, block, [&](const std::shared_ptr<comm::Group>& group) {
    auto model = std::make_shared<Uneven>();
    Engine engine(model, AdamW{.lr = 1e-2}, c, group);
    Outcome mine;
    for (int64_t i = 0; i < 3 * c.gradient_accumulation_steps; ++i) {
      const auto loss =
          model->loss(group->rank(), i, c.stage == 3 || c.gradient_accumulation_steps > 1);
      engine.backward(loss);
      if (i == 0 && c.gradient_accumulation_steps == 1)
        mine.gradient = engine.gradient("net.b.weight");
      const auto result = engine.step();
      mine.losses.push_back(loss.item<float>());
      if (result.boundary) mine.norms.push_back(result.grad_norm);
    }
    mine.weights = weights(engine);
    return mine;
  });
}

inline void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  expect_equal(a.weights, b.weights);
  ASSERT_EQ(a.gradient.defined(), b.gradient.defined());
  if (a.gradient.defined()) {
    EXPECT_TRUE(torch::equal(a.gradient, b.gradient));
  }
}

// The message with which an engine refuses a configuration; all ranks give it.
inline std::string refusal(World world, const Config& c) {
  std::string message;
  std::mutex mutex;
  run_in(world, [&](auto group) {
    auto net = std::make_shared<Net>();
    const auto mine = message_of<ConfigError>([&] { Engine(net, AdamW{}, c, group); });
    const std::lock_guard lock(mutex);
    message = mine;
  });
  return message;
}

inline Config clipped(int stage, bool bf16, int64_t k = 1) {
  auto c = config(stage, bf16, k);
  c.gradient_clipping = 0.05;  // so that the norm is in the weights
  return c;
}

}  // namespace zero
