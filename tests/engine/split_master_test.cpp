// Master weights in two halves: the same bits at every stage and tier, 2 bytes a parameter less.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/optim/halves.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::HasSubstr;
using testing::ThrowsMessage;

Config split(int stage) {
  auto c = config(stage, true);
  c.split_master_weights = true;
  return c;
}

TEST(SplitMaster, GivesTheSameBitsAtEveryStageAndTier) {
  const TemporaryFolder folder;
  const std::vector<Optimizer> optimizers{AdamW{.lr = 1e-2}, Sgd{.lr = 1e-2, .momentum = 0.9},
                                          Sgd{.lr = 1e-2}};
  for (const auto& optimizer : optimizers) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      const auto train_with = [&](const Config& c) {
        return states_after_training<Net>(c, optimizer, ranks, folder.path());
      };
      const auto expected = train_with(split(0));
      for (int stage = 0; stage <= 3; ++stage) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << ", ranks " << ranks);
        expect_equal(train_with(split(stage)), expected);
        expect_equal(train_with(on_disk(split(stage), folder)), expected);
      }
      SCOPED_TRACE(testing::Message() << "ranks " << ranks);
      expect_equal(train_with(all_on_host(split(3))), expected);
      expect_equal(train_with(all_on_disk(split(3), folder)), expected);
      auto part = all_on_disk(split(3), folder, 400);
      part.offload_optimizer.gradients = true;
      part.max_live_parameters = 0;
      expect_equal(train_with(part), expected);
    }
  }
  expect_no_left_overs(folder);
}

// Whole master weights that one process updates in the plain reference, and round to the
// parameters as halves do.
TEST(SplitMaster, IsAWholeMasterThatRoundsTiesAway) {
  run_as_threads(1, [&](auto group) {
    const AdamW optimizer{.lr = 1e-2};
    auto net = std::make_shared<Net>();
    std::vector<at::Tensor> masters;
    for (const auto& p : net->parameters()) masters.push_back(p.detach().clone());
    auto twin = std::make_shared<Net>();
    twin->to(at::kBFloat16);
    Engine engine(net, optimizer, split(0), group);
    std::vector<at::Tensor> first, second;
    for (const auto& m : masters) {
      first.push_back(torch::zeros_like(m));
      second.push_back(torch::zeros_like(m));
    }
    for (int64_t step = 0; step < 4; ++step) {
      const auto parameters = twin->parameters();
      for (size_t p = 0; p < masters.size(); ++p) {
        const auto* master = masters[p].const_data_ptr<float>();
        auto* narrow = parameters[p].mutable_data_ptr<at::BFloat16>();
        for (int64_t i = 0; i < masters[p].numel(); ++i)
          narrow[i].x = optim::split(master[i]).upper;
        parameters[p].mutable_grad() = at::Tensor();
      }
      loss_of(*twin, 0, step).backward();
      for (size_t p = 0; p < masters.size(); ++p) {
        optim::update_reference(
            optimizer, step + 1, optimizer.lr, 1.0,
            {.numel = masters[p].numel(),
             .master = masters[p].mutable_data_ptr<float>(),
             .state = {first[p].mutable_data_ptr<float>(), second[p].mutable_data_ptr<float>()},
             .gradient = parameters[p].grad().contiguous().const_data_ptr(),
             .gradient_dtype = at::kBFloat16});
      }
      train(engine, *net, 1, step);
      expect_equal(weights(engine), masters);
    }
  });
}

TEST(SplitMaster, TakesTwoBytesAParameterLessByTheLedger) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      run_as_threads(ranks, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{}, split(stage), group);
        train(engine, *net, 2);
        int64_t padded = 0;
        for (const auto& unit : engine.layout().units()) padded += unit.numel;
        const auto formula = engine.memory_formula();
        EXPECT_EQ(formula.optimizer, 10 * (stage >= 1 ? padded / ranks : padded));
        EXPECT_EQ(group->ledger()->usage(Category::optimizer).peak, formula.optimizer);
      });
    }
  }
}

// One form loads what the other saves: files hold whole master weights.
TEST(SplitMaster, FilesHoldWholeMasterWeights) {
  const TemporaryFolder folder;
  const auto path = [&](const char* name) { return (folder.path() / name).string(); };
  for (const bool halves : {false, true}) {
    run_as_threads(2, [&](auto group) {
      auto from = config(3, true);
      from.split_master_weights = halves;
      auto to = from;
      to.split_master_weights = !halves;
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, from, group);
      train(engine, *net, 3);
      const auto expected = weights(engine);
      engine.save(path("sharded"));
      engine.save_full(path("full"));
      auto twin = std::make_shared<Net>();
      Engine other(twin, AdamW{.lr = 1e-2}, to, group);
      other.load(path("sharded"));
      expect_equal(weights(other), expected);
      train(other, *twin, 1, 3);
      other.load_full(path("full"));
      expect_equal(weights(other), expected);
    });
  }
}

TEST(SplitMaster, WhatTheUserWritesIsTheUpperHalf) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      SCOPED_TRACE(testing::Message() << "stage " << stage);
      auto net = std::make_shared<Net>();
      Engine engine(net, Sgd{.lr = 0.0}, split(stage), group);
      const auto before = engine.parameter("b.weight");
      {
        const torch::NoGradGuard guard;
        net->a->weight.fill_(0.25);
        net->a->bias.zero_();
      }
      train(engine, *net, 1);
      const auto written = engine.parameter("a.weight");
      EXPECT_TRUE(torch::allclose(written, torch::full({33, 7}, 0.25), 1.0 / 256, 0));
      EXPECT_TRUE(
          torch::equal(written.to(at::kBFloat16), torch::full({33, 7}, 0.25).to(at::kBFloat16)));
      EXPECT_TRUE(torch::equal(engine.parameter("a.bias"), torch::zeros({33})));
      EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), before));
      engine.set_parameter("a.weight", torch::full({33, 7}, 0.1));
      EXPECT_TRUE(torch::equal(engine.parameter("a.weight"), torch::full({33, 7}, 0.1)))
          << "by name both halves are set";
    });
  }
}

TEST(SplitMaster, WhatCannotBeSplitIsRefusedWithTheRemedy) {
  auto c = split(3);
  c.bf16 = false;
  EXPECT_THAT([&] { c.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("bf16.enabled")));
  EXPECT_TRUE(Config::parse(split(3).dump(), 1).split_master_weights);
  const TemporaryFolder folder;
  auto host = split(2);
  host.offload_optimizer.device = OffloadDevice::cpu;
  auto disk = all_on_disk(split(3), folder);
  disk.offload_optimizer = {};
  for (const auto& crossing : {host, disk}) {
    run_as_threads(2, [&](auto group) {
      EXPECT_THAT([&] { Engine(std::make_shared<Net>(), AdamW{}, crossing, group); },
                  ThrowsMessage<ConfigError>(HasSubstr("split_master_weights needs")));
    });
  }
}

}  // namespace
}  // namespace zero
