// Measures what a step of a model of a billion parameters holds beside the model's states.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

constexpr int64_t kWidth = 2500;  // 6.25 million parameters a layer

struct Tower : torch::nn::Module {
  explicit Tower(int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) {
      weights.push_back(register_parameter(std::to_string(i),
                                           torch::full({kWidth, kWidth}, 1e-3, torch::kBFloat16)));
    }
  }
  at::Tensor loss() {
    auto x = torch::ones({1, kWidth}, torch::kBFloat16);
    for (const auto& weight : weights) x = torch::tanh(torch::mm(x, weight));
    return x.to(torch::kFloat).mean();
  }
  std::vector<at::Tensor> weights;
};

/// The peaks of a rank of two after two steps, but for what the formula of the states names.
std::map<std::string, int64_t> peaks_beside_states(int64_t layers) {
  std::map<std::string, int64_t> peaks;
  const TemporaryFolder folder;
  comm::run_as_threads(2, [&](auto group) {
    const auto net = std::make_shared<Tower>(layers);
    Config config;
    config.stage = 3;
    config.bf16 = true;
    // The master weights go to disk, so that the states fit a small machine.
    config.offload_optimizer.device = OffloadDevice::nvme;
    config.offload_optimizer.nvme_path = folder.path().string();
    Engine engine(net, Sgd{.lr = 1e-3}, config, group);
    group->ledger()->reset_peaks();
    for (int i = 0; i < 2; ++i) {
      engine.backward(net->loss());
      engine.step();
    }
    if (group->rank() > 0) return;
    EXPECT_EQ(engine.parameter_count(), layers * kWidth * kWidth);
    const auto& ledger = *group->ledger();
    EXPECT_EQ(ledger.usage(Category::gradients).peak, engine.memory_formula().gradients);
    for (const auto category : {Category::communication, Category::offload_buffers,
                                Category::gradient_buckets, Category::gathered_units})
      peaks[std::string(name(category))] = ledger.usage(category).peak;
    // Beside staging buffers the ranks share each unit's epoch.
    peaks["communication"] -= engine.layout().unit_count() * int64_t{sizeof(uint64_t)};
  });
  return peaks;
}

TEST(LargeModel, HoldsTheSameBuffersAsASmallOne) {
  install_host_allocator();
  const auto small = peaks_beside_states(2);  // 12.5 million parameters
  EXPECT_GT(small.at("communication"), 0);
  EXPECT_GT(small.at("offload_buffers"), 0);
  EXPECT_GT(small.at("gradient_buckets"), 0);
  EXPECT_EQ(peaks_beside_states(160), small);  // 1 billion
}

}  // namespace
}  // namespace zero
