// Parameters and gradients that cross between hosts quantised: qwZ, qgZ, LoCo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/engine/worlds.h"
#include "tests/support/paper_traffic.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/partition/formulas.h"

namespace zero {
namespace {

using comm::Collective;
using comm::run_as_hosts;

constexpr World kWorlds[] = {{2, 1}, {2, 2}, {3, 1}};

Config quantised(bool weights, bool gradients, bool bf16 = false, int64_t k = 1) {
  auto c = config(3, bf16, k);
  c.quantised.weights = weights;
  c.quantised.gradients = gradients;
  return c;
}

// The results of a run: rank 0's losses, weights, and what each rank reads on the same input.
struct Run {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> read;
};

Run run(World world, const Config& c, int64_t steps, const Optimizer& optimizer = AdamW{}) {
  Run result;
  result.read.resize(static_cast<size_t>(world.hosts) * static_cast<size_t>(world.ranks_a_host));
  run_as_hosts(world.hosts, world.ranks_a_host, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    const bool tells = group->rank() == 0;
    const int64_t k = c.gradient_accumulation_steps;
    for (int64_t i = 0; i < steps * k; ++i) {
      const auto loss = loss_of(*net, group->rank(), i);
      if (tells) result.losses.push_back(loss.template item<double>());
      engine.backward(loss);
      engine.step();
    }
    {
      const torch::NoGradGuard guard;
      const auto dtype = c.bf16 ? torch::kBFloat16 : torch::kFloat;
      result.read[static_cast<size_t>(group->rank())] = net->forward(input(0, 0, dtype)).clone();
    }
    const auto all = weights(engine);
    if (tells) result.weights = all;
  });
  return result;
}

double distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]).pow(2).sum().item<double>();
  return std::sqrt(sum);
}

TEST(EngineQuantised, TrainingIsDeterministicAndTheSameOnAllHosts) {
  for (const auto world : kWorlds) {
    for (const bool bf16 : {false, true}) {
      const auto c = quantised(true, true, bf16, 2);
      const auto once = run(world, c, 4);
      const auto again = run(world, c, 4);
      EXPECT_EQ(once.losses, again.losses);
      expect_equal(once.weights, again.weights);
      for (const auto& read : once.read) EXPECT_TRUE(torch::equal(read, once.read.front()));
    }
  }
}

TEST(EngineQuantised, TheLossStaysNearTheUnquantised) {
  auto exact = config(3);
  const auto near = [&](const Config& c) {
    const auto a = run({2, 2}, exact, 40).losses;
    const auto b = run({2, 2}, c, 40).losses;
    EXPECT_NE(a, b);
    // As parts of what was to be learnt, which is nearly all learnt by then.
    EXPECT_LT(a.back(), 0.2 * a.front());
    EXPECT_NEAR(a.back(), b.back(), 0.02 * a.front());
  };
  near(quantised(true, false));
  near(quantised(false, true));
  near(quantised(true, true));
  auto eight = quantised(true, true);
  eight.quantised.weights_format = comm::WireFormat::fp8;
  eight.quantised.gradients_format = comm::WireFormat::int8;
  near(eight);
}

// The kept values are whole; operators read what the messages say.
TEST(EngineQuantised, WeightsAreKeptExactAndReadQuantised) {
  std::vector<at::Tensor> original;
  for (const auto& p : Net().parameters()) original.push_back(p.detach().clone());
  const auto exact = run({2, 1}, config(3), 0);
  const auto read = run({2, 1}, quantised(true, false), 0);
  expect_equal(read.weights, original);
  EXPECT_FALSE(torch::equal(read.read[0], exact.read[0]));
  EXPECT_LT((read.read[0] - exact.read[0]).abs().max().item<double>(), 0.02);
  run_as_hosts(2, 1, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, quantised(true, true), group);
    size_t i = 0;
    engine.visit_parameters([&](const std::string& name, const at::Tensor& value) {
      EXPECT_TRUE(torch::equal(value, original[i++])) << name;
    });
  });
}

TEST(EngineQuantised, FrozenWeightsHaveTheirOwnKey) {
  const auto reads = [](bool trained, bool frozen) {
    at::Tensor result;
    std::mutex mutex;
    run_as_hosts(2, 1, [&](auto group) {
      auto net = std::make_shared<Net>();
      for (auto& p : net->a->parameters()) p.set_requires_grad(false);
      auto c = config(3);
      c.quantised.weights = trained;
      c.quantised.frozen_weights = frozen;
      Engine engine(net, AdamW{}, c, group);
      const torch::NoGradGuard guard;
      const auto output = net->a->forward(input(0, 0, torch::kFloat)).clone();
      const std::lock_guard lock(mutex);
      result = output;
    });
    return result;
  };
  const auto exact = reads(false, false);
  EXPECT_TRUE(torch::equal(reads(true, false), exact));
  EXPECT_FALSE(torch::equal(reads(false, true), exact));
}

TEST(EngineQuantised, ParametersOnTheHostAreQuantisedToo) {
  auto c = quantised(true, true);
  const auto device = run({2, 2}, c, 3);
  c.offload_param.device = OffloadDevice::cpu;
  const auto host = run({2, 2}, c, 3);
  EXPECT_EQ(device.losses, host.losses);
  expect_equal(device.weights, host.weights);
}

TEST(EngineQuantised, OnOneHostNothingIs) {
  const auto train_on_one = [](const Config& c) {
    std::vector<at::Tensor> result;
    comm::run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, c, group);
      train(engine, *net, 3);
      const auto all = weights(engine);
      if (group->rank() == 0) result = all;
      EXPECT_EQ(engine.traffic_formula().all_gather_link, 0);
    });
    return result;
  };
  auto c = quantised(true, true);
  c.quantised.feedback = ErrorFeedback{};
  expect_equal(train_on_one(c), train_on_one(config(3)));
}

// A loss that is the same at each step, as with gradients that change little, is made up for.
TEST(EngineQuantised, FeedbackKeepsWeightsNearerToTheUnquantised) {
  const Sgd sgd{.lr = 0.005};
  const World world{2, 1};
  const auto exact = run(world, config(3), 60, sgd);
  auto c = quantised(false, true);
  const auto without = run(world, c, 60, sgd);
  c.quantised.feedback = ErrorFeedback{.beta = 0.0};
  const auto with = run(world, c, 60, sgd);
  EXPECT_LT(distance(with.weights, exact.weights), 0.8 * distance(without.weights, exact.weights));
  // With a reset after each update there is none.
  c.quantised.feedback->reset_every = 1;
  expect_equal(run(world, c, 60, sgd).weights, without.weights);
}

TEST(EngineQuantised, WhatFeedbackKeepsIsInTheFormulaAndTheLedger) {
  for (const auto world : kWorlds) {
    run_as_hosts(world.hosts, world.ranks_a_host, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = quantised(true, true);
      int64_t without = 0;
      {
        Engine engine(net, AdamW{}, c, group);
        without = engine.memory_formula().gradients;
      }
      net = std::make_shared<Net>();
      c.quantised.feedback = ErrorFeedback{};
      Engine engine(net, AdamW{}, c, group);
      group->ledger()->reset_peaks();
      train(engine, *net, 2);
      const auto formula = engine.memory_formula().gradients;
      EXPECT_EQ(group->ledger()->usage(Category::gradients).peak, formula);
      int64_t kept = 0;
      for (int64_t u = 0; u < engine.layout().unit_count(); ++u) {
        const int64_t n = engine.layout().slice_numel(u);
        kept += (world.hosts - 1) * (n + 4 * ((n + 127) / 128));
      }
      EXPECT_EQ(formula - without, kept);
    });
  }
}

TEST(EngineQuantised, TrafficBetweenHostsIsTheFormula) {
  for (const auto world : kWorlds) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        run_as_hosts(world.hosts, world.ranks_a_host, [&](auto group) {
          auto net = std::make_shared<Chain>();
          auto c = quantised(true, true, bf16, k);
          c.quantised.feedback = ErrorFeedback{};
          c.quantised.weights_format = comm::WireFormat::fp8;
          c.max_live_parameters = 0;  // each unit is gathered forward and backward
          c.unit_bytes = 64 * 64 * (bf16 ? 2 : 4);
          Engine engine(net, AdamW{}, c, group);
          const auto x =
              torch::ones({2, 64}, bf16 ? torch::kBFloat16 : torch::kFloat).requires_grad_();
          group->traffic().reset();
          for (int64_t i = 0; i < k; ++i) {
            engine.backward(net->forward(x).mean());
            engine.step();
          }
          const auto formula = engine.traffic_formula();
          EXPECT_EQ(group->traffic().count(Collective::all_gather).link_bytes,
                    formula.all_gather_link);
          EXPECT_EQ(group->traffic().count(Collective::reduce_scatter).link_bytes,
                    formula.reduce_scatter_link);
          paper::LinkTraffic whole;
          for (const auto& unit : engine.layout().units()) {
            const auto of_unit = paper::link_traffic({world.hosts, world.ranks_a_host}, unit.numel,
                                                     {.sharding = partition::sharding_of_stage(3),
                                                      .micro_batches = k,
                                                      .parameters = {.bits = 8, .block = 128},
                                                      .gradients = {.bits = 4, .block = 128}});
            whole.gather += of_unit.gather;
            whole.reduce += of_unit.reduce;
          }
          EXPECT_EQ(formula.all_gather_link * world.ranks_a_host, whole.gather);
          EXPECT_EQ(formula.reduce_scatter_link * world.ranks_a_host, whole.reduce);
        });
      }
    }
  }
}

}  // namespace
}  // namespace zero
