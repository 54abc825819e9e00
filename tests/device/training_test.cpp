// Training on the simulated device gives the CPU's losses and weights, bit for bit, under every
// schedule, and no report; and the host waits for nothing while it enqueues the steps.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/device/models.h"
#include "tests/device/testing.h"

namespace zero::simulated {
namespace {

struct Case {
  std::string name;
  std::function<std::shared_ptr<Learner>()> make;
  std::function<Tensor()> x, y;
  bool adam;
};

struct Trained {
  std::vector<float> losses;
  std::vector<Tensor> weights;
  int64_t host_waits = 0;  // while the steps were enqueued
};

Trained train(const Case& what, c10::Device on) {
  torch::manual_seed(7);
  const auto model = what.make();
  model->to(on);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (what.adam) {
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                      torch::optim::AdamWOptions(1e-2));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                    torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  torch::manual_seed(8);
  const auto waits_before = counts().host_waits;
  std::vector<Tensor> losses;
  for (int step = 0; step < 4; ++step) {
    const auto x = what.x().pin_memory().to(on, /*non_blocking=*/true);
    const auto y = what.y().pin_memory().to(on, /*non_blocking=*/true);
    const auto loss = model->loss(x, y);
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
    losses.push_back(loss.detach());
  }
  Trained trained;
  trained.host_waits = counts().host_waits - waits_before;
  for (const auto& loss : losses) trained.losses.push_back(loss.item<float>());
  for (const Tensor& p : model->parameters()) trained.weights.push_back(p.detach().cpu());
  return trained;
}

class Training : public testing::TestWithParam<Case> {};

TEST_P(Training, EqualsTheCpu) {
  const Trained reference = train(GetParam(), at::kCPU);
  for (const Options& options : schedules(3)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    const Trained trained = train(GetParam(), device());
    EXPECT_EQ(trained.losses, reference.losses);
    ASSERT_EQ(trained.weights.size(), reference.weights.size());
    for (size_t i = 0; i < trained.weights.size(); ++i) {
      EXPECT_TRUE(at::equal(trained.weights[i], reference.weights[i])) << "parameter " << i;
    }
    EXPECT_EQ(trained.host_waits, 0);
    EXPECT_EQ(reports(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Training,
                         testing::Values(Case{"Mlp", make<Mlp>, vectors, classes, false},
                                         Case{"Gpt", make<Gpt>, tokens, tokens, true},
                                         Case{"Convolution", make<Convolution>, images, classes,
                                              true},
                                         Case{"Lstm", make<Lstm>, sequences, classes, true},
                                         Case{"Gru", make<Gru>, sequences, classes, false},
                                         Case{"Cells", make<Cells>, sequences, classes, false}),
                         [](const auto& info) { return info.param.name; });

// A parameter's gradient is made on the stream of its forward operators, also where the backward
// pass is started on another one; autograd's own events order the rest.
TEST(Training, BackwardMayBeCalledOnAnotherStream) {
  for (const Options& options : schedules(2)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    const auto w = torch::randn({32, 32}).to(device()).requires_grad_();
    const auto x = torch::randn({32, 32}).to(device());
    synchronize();
    Tensor loss;
    {
      const c10::StreamGuard guard(stream(2));
      loss = x.mm(w).mm(w).sum();
    }
    const c10::StreamGuard guard(stream(3));
    loss.backward();
    w.grad().mul(2);
    synchronize();
    EXPECT_EQ(reports(), "");
  }
}

}  // namespace
}  // namespace zero::simulated
