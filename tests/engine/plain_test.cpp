// The plain ZeRO is the oracle: at each stage Engine gives its losses, norms and weights, bit for
// bit.
#include "zero/engine/plain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/traffic.h"

namespace zero {
namespace {

constexpr int64_t kSteps = 4;

/// Runs `train` on ranks that are threads, and returns what rank 0 gives.
Outcome of_rank_0(int ranks, const std::function<Outcome(std::shared_ptr<comm::Group>)>& train) {
  std::mutex mutex;
  Outcome result;
  comm::run_as_threads(ranks, [&](const std::shared_ptr<comm::Group>& group) {
    auto mine = train(group);
    const std::lock_guard lock(mutex);
    if (group->rank() == 0) result = std::move(mine);
  });
  return result;
}

/// The extra layer of the model is left out by all ranks but 1 in the first pass, and by all in
/// every later step's first one.
at::Tensor loss_in(Uneven& model, int rank, int64_t pass, int64_t k) {
  return model.loss(rank, pass % k == 0 ? 0 : pass, false);
}

Outcome by_engine(const Config& config, const Optimizer& optimizer, int ranks) {
  return of_rank_0(ranks, [&](auto group) {
    auto model = std::make_shared<Uneven>();
    Engine engine(model, optimizer, config, group);
    const int64_t k = config.gradient_accumulation_steps;
    Outcome outcome;
    for (int64_t pass = 0; pass < kSteps * k; ++pass) {
      const auto loss = loss_in(*model, group->rank(), pass, k);
      outcome.losses.push_back(loss.template item<float>());
      engine.backward(loss);
      if (const auto result = engine.step(); result.boundary)
        outcome.norms.push_back(result.grad_norm);
    }
    for (const auto& name : engine.parameter_names()) {
      if (name.find("frozen") == std::string::npos)
        outcome.weights.push_back(engine.parameter(name));
    }
    return outcome;
  });
}

Outcome by_plain(const Config& config, const Optimizer& optimizer, int ranks) {
  return of_rank_0(ranks, [&](auto group) {
    auto model = std::make_shared<Uneven>();
    const int64_t k = config.gradient_accumulation_steps;
    PlainZero zero(named_tensors(model), optimizer,
                   {.stage = config.stage,
                    .bf16 = config.bf16,
                    .micro_batches = k,
                    .gradient_clipping = config.gradient_clipping,
                    .unit_bytes = config.unit_bytes},
                   group);
    Outcome outcome;
    for (int64_t step = 0; step < kSteps; ++step) {
      std::vector<PlainZero::Pass> passes;
      for (int64_t pass = step * k; pass < (step + 1) * k; ++pass) {
        passes.emplace_back([&, pass] {
          const auto loss = loss_in(*model, group->rank(), pass, k);
          outcome.losses.push_back(loss.template item<float>());
          loss.backward();
        });
      }
      outcome.norms.push_back(zero.step(passes).grad_norm);
    }
    outcome.weights = zero.weights();
    return outcome;
  });
}

using Case = std::tuple<int, int, bool>;  // stage, ranks, bf16
class PlainZeroTest : public testing::TestWithParam<Case> {};

TEST_P(PlainZeroTest, EngineHasItsBits) {
  const auto [stage, ranks, bf16] = GetParam();
  for (const Optimizer& optimizer :
       {Optimizer(AdamW{.lr = 1e-2}), Optimizer(Sgd{.lr = 0.1, .momentum = 0.9})}) {
    for (const int64_t k : {1, 3}) {
      for (const double clipping : {0.0, 0.05}) {
        SCOPED_TRACE(std::to_string(k) + " micro-batches, clipping " + std::to_string(clipping));
        auto c = config(stage, bf16, k);
        c.gradient_clipping = clipping;
        const auto plain = by_plain(c, optimizer, ranks);
        EXPECT_LT(plain.losses.back(), plain.losses.front());
        expect_same(by_engine(c, optimizer, ranks), plain);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlainZeroTest,
                         testing::Combine(testing::Range(0, 4), testing::Range(1, 4),
                                          testing::Bool()),
                         [](const auto& info) {
                           return "Stage" + std::to_string(std::get<0>(info.param)) + "Ranks" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) ? "Bf16" : "Fp32");
                         });

// The bytes that a rank sends in a step are those of the table in plain.h.
TEST(PlainZeroTraffic, IsThatOfThePaper) {
  for (int stage = 0; stage <= 3; ++stage) {
    comm::run_as_threads(2, [&](const std::shared_ptr<comm::Group>& group) {
      auto chain = std::make_shared<Chain>();
      PlainZero zero(named_tensors(chain), AdamW{}, {.stage = stage, .micro_batches = 3}, group);
      group->traffic().reset();
      const auto pass = [&] { chain->forward(torch::ones({2, 64})).mean().backward(); };
      zero.step({pass, pass, pass});
      const int64_t psi = 4 * 64 * 64;
      const auto sent = [&](comm::Collective of) {
        return group->traffic().count(of).logical_bytes;
      };
      const int64_t share = psi * 4 / 2;  // Psi (N-1)/N in bytes
      EXPECT_EQ(sent(comm::Collective::all_reduce), stage == 0 ? 2 * share : 0);
      EXPECT_EQ(sent(comm::Collective::reduce_scatter), stage == 0   ? 0
                                                        : stage == 1 ? share
                                                                     : 3 * share);
      EXPECT_EQ(sent(comm::Collective::all_gather), stage == 0   ? 0
                                                    : stage == 3 ? 3 * share
                                                                 : share);
    });
  }
}

TEST(PlainZeroUpdate, IsLeftOutWhereAGradientIsNotFiniteOnAnyRank) {
  comm::run_as_threads(2, [&](const std::shared_ptr<comm::Group>& group) {
    auto net = std::make_shared<Net>();
    PlainZero zero(named_tensors(net), AdamW{}, {.stage = 3}, group);
    const auto before = zero.weights();
    const double factor = group->rank() == 1 ? INFINITY : 1;
    const auto result = zero.step({[&] { (loss_of(*net, 0, 0) * factor).backward(); }});
    EXPECT_FALSE(result.updated);
    expect_equal(zero.weights(), before);
    EXPECT_TRUE(zero.step({[&] { loss_of(*net, 0, 0).backward(); }}).updated);
  });
}

TEST(PlainZeroErrors, NameTheOptimizerThatNeedsMoreThanAnElement) {
  auto net = std::make_shared<Net>();
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { PlainZero zero(named_tensors(net), Muon{}, {}, comm::single()); }),
              testing::HasSubstr("PlainZero was given Muon at stage 0"));
}

}  // namespace
}  // namespace zero
