// Blocks that a pass leaves out (stochastic depth): Note [Sharded gradients] in
// engine/sharded_gradients.cpp.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <map>
#include <mutex>

#include "tests/engine/net.h"
#include "zero/comm/group.h"
#include "zero/zero.h"

namespace zero {
namespace {

constexpr int64_t kBlocks = 32;
constexpr int64_t kWidth = 32;
constexpr int64_t kBlockBytes = (kWidth * kWidth + kWidth) * 4;

struct DeepNet : nn::Module {
  DeepNet() {
    const torch::NoGradGuard guard;
    double phase = 0.3;
    for (int64_t i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), nn::Linear(kWidth, kWidth)));
      for (auto& p : blocks.back()->parameters())
        p.copy_(
            torch::sin(torch::arange(p.numel()) * 0.7 + (phase += 1.1)).mul(0.1).view(p.sizes()));
    }
  }
  at::Tensor forward(at::Tensor x, int64_t left_out) {
    for (int64_t i = 0; i < kBlocks; ++i) {
      if (i != left_out) x = x + torch::tanh(blocks[static_cast<size_t>(i)](x));
    }
    return x.pow(2).mean();
  }
  std::vector<nn::Linear> blocks;
};

struct Run {
  std::vector<at::Tensor> weights;
  int64_t buckets = 0;  // bytes, the peak once the first step has told the order
};

// From the second step on the block whose gradient comes first is left out, on every rank.
Run train_without_last_block(int stage) {
  Run result;
  std::mutex mutex;
  comm::run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<DeepNet>();
    Config config{.stage = stage};
    config.unit_bytes = kBlockBytes;
    config.gradient_clipping = 0;
    Engine engine(net, AdamW{.lr = 1e-2}, config, group);
    for (int64_t step = 0; step < 4; ++step) {
      const auto x = torch::cos(torch::arange(4 * kWidth) * 0.9 + group->rank() * 1.7 + step)
                         .view({4, kWidth});
      if (step == 2) group->ledger()->reset_peaks();
      engine.backward(net->forward(x, step == 0 ? -1 : kBlocks - 1));
      engine.step();
    }
    auto all = weights(engine);
    const std::lock_guard lock(mutex);
    if (group->rank() == 0)
      result = {std::move(all), group->ledger()->usage(Category::gradient_buckets).peak};
  });
  return result;
}

TEST(AbsentBlock, DoesNotKeepAllLaterBucketsAlive) {
  const auto replicated = train_without_last_block(0);
  for (const int stage : {2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const auto sharded = train_without_last_block(stage);
    expect_equal(sharded.weights, replicated.weights);
    // Weight and bias are units of their own or share one; at most 8 complete ones wait, and one
    // fills, one is reduced.
    EXPECT_LE(sharded.buckets, 12 * 2 * kBlockBytes);
    EXPECT_LT(sharded.buckets, kBlocks * kBlockBytes * 3 / 4);
  }
}

}  // namespace
}  // namespace zero
