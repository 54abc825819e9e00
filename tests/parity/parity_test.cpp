// Stages 0 to 3 give the same losses and weights, bit for bit. Every rank is a process (dropout
// draws from the process's generator), started by `zero launch`; each test runs on the whole group.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <tuple>

#include "tests/parity/train.h"
#include "zero/comm/group.h"
#include "zero/comm/job.h"
#include "zero/comm/rendezvous.h"

namespace zero::parity {
namespace {

const std::shared_ptr<comm::Group>& world() {
  static const auto group = zero::init();
  return group;
}

Config config(int stage, at::ScalarType dtype, double clipping, int64_t accumulate = 1,
              int64_t unit_bytes = 4096) {
  Config result;
  result.stage = stage;
  result.bf16 = dtype == at::kBFloat16;
  result.fp16 = dtype == at::kHalf;
  // Some steps overflow.
  result.loss_scaling = {.initial_power = 18, .window = 4, .hysteresis = 1};
  result.gradient_clipping = clipping;
  result.gradient_accumulation_steps = accumulate;
  result.unit_bytes = unit_bytes;
  result.max_live_parameters = 6000;  // about a quarter of the model
  return result;
}

Outcome run(const Recipe& model, const Config& config, int steps = 20) {
  return train({model, config, steps}, world(), world()->rank());
}

using Case = std::tuple<at::ScalarType, double>;  // dtype, clipping
std::string name_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? "fp16" : dtype == at::kBFloat16 ? "bf16" : "fp32";
}

class Parity : public testing::TestWithParam<Case> {};

TEST_P(Parity, StagesAreBitIdentical) {
  const auto [dtype, clipping] = GetParam();
  const auto expected = run(gpt2(), config(0, dtype, clipping));
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "it learns";
  for (int stage = 1; stage <= 3; ++stage) {
    EXPECT_EQ(difference(expected, run(gpt2(), config(stage, dtype, clipping)), *world()), "")
        << "stage " << stage;
  }
}

TEST_P(Parity, AccumulationIsBitIdenticalWithinThePairsAndRoundsBetweenThem) {
  const auto [dtype, clipping] = GetParam();
  const auto zero = run(gpt2(), config(0, dtype, clipping, 3), 8);
  const auto two = run(gpt2(), config(2, dtype, clipping, 3), 8);
  EXPECT_EQ(difference(zero, run(gpt2(), config(1, dtype, clipping, 3), 8), *world()), "");
  EXPECT_EQ(difference(two, run(gpt2(), config(3, dtype, clipping, 3), 8), *world()), "");
  for (size_t i = 0; i < zero.losses.size(); ++i) {
    // fp32 rounding of the sums; in 16 bits a weight may then round to its neighbour.
    EXPECT_NEAR(zero.losses[i], two.losses[i], dtype != at::kFloat ? 2e-2 : 1e-4 * zero.losses[i])
        << "micro-batch " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Parity,
                         testing::Values(Case{at::kFloat, 0.0}, Case{at::kFloat, 0.5},
                                         Case{at::kBFloat16, 0.0}, Case{at::kBFloat16, 0.5},
                                         Case{at::kHalf, 0.0}, Case{at::kHalf, 0.5}),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) > 0 ? "Clipped" : "Unclipped");
                         });

TEST(ParityOfModels, EveryKindOfModelIsBitIdentical) {
  for (const auto& [name, make] : other_models()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      if (dtype != at::kFloat && name == "lstm")
        continue;  // LibTorch has no such cell on every CPU
      const auto expected = run(make, config(0, dtype, 0.5, 1, 256), 20);
      EXPECT_LT(expected.losses.back(), expected.losses.front()) << name;
      for (int stage = 1; stage <= 3; ++stage) {
        EXPECT_EQ(difference(expected, run(make, config(stage, dtype, 0.5, 1, 256), 20), *world()),
                  "")
            << name << " in " << name_of(dtype) << ", stage " << stage;
      }
    }
  }
}

// The test of the test: summing over the ranks in another order must be noticed. Two summands
// commute, so it takes three ranks.
TEST(ParityOfOrder, AnotherReductionOrderIsNoticed) {
  ASSERT_GE(world()->size(), 3);
  // The same ranks, numbered the other way round.
  const auto job = comm::job_from_environment();
  const auto store =
      comm::join_store(job, std::chrono::seconds(60), comm::rendezvous_folder()).store;
  const auto backwards = comm::shared_memory_group(store, job.size - 1 - job.rank, job.size);
  const auto expected = run(gpt2(), config(2, at::kFloat, 0.0), 6);
  const auto actual = train({gpt2(), config(2, at::kFloat, 0.0), 6}, backwards, world()->rank());
  EXPECT_NE(difference(expected, actual, *world()), "");
}

// Alone, in fp32, the engine must do what a plain LibTorch loop does.
TEST(ParityWithLibTorch, StageZeroOnOneRankFollowsAPlainLoop) {
  ASSERT_EQ(world()->size(), 1);
  const auto ours = run(gpt2(), config(0, at::kFloat, 0.5));
  torch::manual_seed(7);
  auto subject = gpt2()(at::kFloat);
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : subject.tensors.parameters) parameters.push_back(tensor);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(3e-3).weight_decay(0.1));
  torch::manual_seed(100);
  for (int step = 0; step < 20; ++step) {
    const auto loss = subject.loss(0, step);
    const auto expected = loss.item<float>();
    EXPECT_NEAR(ours.losses[static_cast<size_t>(step)], expected, 1e-5 * std::abs(expected))
        << "step " << step;
    optimizer.zero_grad();
    loss.backward();
    const double norm = torch::nn::utils::clip_grad_norm_(parameters, 0.5);
    EXPECT_NEAR(ours.norms[static_cast<size_t>(step)], norm, 1e-4 * norm);
    optimizer.step();
  }
}

}  // namespace
}  // namespace zero::parity
