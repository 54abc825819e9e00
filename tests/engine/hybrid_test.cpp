// Hybrid sharding (mics_shard_size) through the engine's public interface: results beside those of
// full sharding, memory and traffic beside the formulas, saving, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "tests/support/paper_traffic.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/partition/formulas.h"
#include "zero/partition/link_bytes.h"

namespace zero {
namespace {

using comm::Collective;
using testing::AllOf;
using testing::HasSubstr;

Config hybrid(Config c, int64_t size) {
  c.mics_shard_size = size;
  return c;
}

TEST(HybridSharding, GivesTheBitsOfFullShardingOnTheSameHostsAndOfOneHostInTheirOrder) {
  for (const int stage : {1, 2, 3}) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + (bf16 ? " bf16" : " fp32"));
      const auto c = clipped(stage, bf16);
      const auto full = outcome_of(kTwoByTwo, c);
      expect_same(outcome_of(kTwoByTwo, hybrid(c, 2)), full);
      expect_same(outcome_of(kFourByOne, hybrid(c, 2)), full);
      expect_same(outcome_of(kFourByOne, c, 2), full);
      expect_same(outcome_of(kTwoByOne, hybrid(c, 1)), outcome_of(kTwoByOne, c));
    }
  }
}

TEST(HybridSharding, OfAsManyRanksAsThereAreIsFullSharding) {
  const auto c = clipped(3, true);
  expect_same(outcome_of(kTwoByTwo, hybrid(c, 4)), outcome_of(kTwoByTwo, c));
}

// Shards of one rank are stage 0, whatever stage is asked for: also in how sums are kept in fp16's
// range.
TEST(HybridSharding, OfOneRankIsStageZeroInFp16Too) {
  auto c = clipped(0, false, 2);
  c.fp16 = true;
  c.communication_dtype = DtypeName::fp16;
  for (const int stage : {2, 3}) {
    auto sharded = hybrid(c, 1);
    sharded.stage = stage;
    expect_same(outcome_of(kTwoByOne, sharded), outcome_of(kTwoByOne, c));
  }
}

TEST(HybridSharding, HoldsTheStatesOfABlockByTheFormulaAndTheLedger) {
  for (const int stage : {1, 2, 3}) {
    run_in(kTwoByTwo, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, hybrid(config(stage, true), 2), group);
      train(engine, *net, 2);
      const auto formula = engine.memory_formula();
      const auto& ledger = *group->ledger();
      EXPECT_EQ(ledger.usage(Category::parameters).current, formula.parameters);
      EXPECT_EQ(ledger.usage(Category::gradients).peak, formula.gradients);
      EXPECT_EQ(ledger.usage(Category::optimizer).current, formula.optimizer);
      // A block on one host reads its units in place.
      EXPECT_EQ(ledger.usage(Category::gathered_units).peak, 0);
      // The bytes of bf16 with fp32 masters, over the two ranks of a block.
      const int64_t psi = engine.layout().numel();
      EXPECT_EQ(formula.optimizer, 12 * psi / 2);
      EXPECT_EQ(formula.parameters, stage == 3 ? 2 * psi / 2 : 2 * psi);
    });
  }
}

TEST(HybridSharding, SendsBetweenHostsTheFormulaOfAnAllReduceOfGradients) {
  for (const auto world : {kTwoByOne, kTwoByTwo}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool bf16 : {false, true}) {
        for (const int64_t k : {1, 2}) {
          SCOPED_TRACE("stage " + std::to_string(stage) + " k " + std::to_string(k));
          run_in(world, [&](auto group) {
            auto chain = std::make_shared<Chain>();
            auto c = hybrid(config(stage, bf16, k), world.ranks_a_host);
            c.unit_bytes = 1 << 20;
            Engine engine(chain, AdamW{}, c, group);
            const auto x =
                torch::ones({2, 64}, bf16 ? torch::kBFloat16 : torch::kFloat).requires_grad_();
            group->traffic().reset();
            for (int64_t i = 0; i < k; ++i) {
              engine.backward(chain->forward(x).mean());
              engine.step();
            }
            const auto formula = engine.traffic_formula();
            const auto count = [&](Collective of) { return group->traffic().count(of); };
            EXPECT_EQ(count(Collective::all_gather).link_bytes, formula.all_gather_link);
            EXPECT_EQ(count(Collective::reduce_scatter).link_bytes, formula.reduce_scatter_link);
            EXPECT_EQ(count(Collective::all_reduce).link_bytes, formula.all_reduce_link);
            EXPECT_EQ(count(Collective::reduce_scatter).logical_bytes, formula.reduce_scatter);
            EXPECT_EQ(count(Collective::all_reduce).logical_bytes, formula.all_reduce);
            // Sums of several micro-batches are fp32.
            const partition::Wire wire{bf16 && k == 1 ? 16 : 32};
            const auto whole =
                paper::link_traffic({world.hosts, world.ranks_a_host}, engine.layout().numel(),
                                    {.sharding = partition::sharding_of_stage(stage),
                                     .hybrid = true,
                                     .deferred = true,
                                     .micro_batches = k,
                                     .gradients = wire});
            EXPECT_EQ(
                (formula.all_gather_link + formula.reduce_scatter_link + formula.all_reduce_link) *
                    world.ranks_a_host,
                whole.total());
          });
        }
      }
    }
  }
}

TEST(HybridSharding, ContinuesFromASaveWithTheSameBits) {
  for (const int stage : {1, 3}) {
    const TemporaryFolder folder;
    const auto c = hybrid(clipped(stage, true), 2);
    std::vector<at::Tensor> uninterrupted;
    std::mutex mutex;
    run_in(kTwoByTwo, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, c, group);
      train(engine, *net, 2);
      engine.save(folder.path() / "sharded");
      engine.save_full(folder.path() / "full");
      train(engine, *net, 2, 2);
      const auto all = weights(engine);
      const std::lock_guard lock(mutex);
      uninterrupted = all;
    });
    const auto continues = [&](const Config& with, bool full) {
      run_in(kTwoByTwo, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{}, with, group);
        if (full) {
          engine.load_full(folder.path() / "full");
        } else {
          engine.load(folder.path() / "sharded");
        }
        EXPECT_EQ(engine.steps(), 2);
        train(engine, *net, 2, 2);
        expect_equal(weights(engine), uninterrupted);
      });
    };
    continues(c, false);
    continues(c, true);
    continues(clipped(stage, true), true);
    continues(clipped(stage, true), false);
  }
}

TEST(HybridSharding, RefusesSizesThatDoNotSuitTheHosts) {
  EXPECT_THAT(refusal(kTwoByTwo, hybrid(config(3), 3)),
              AllOf(HasSubstr("mics_shard_size is 3"), HasSubstr("4 ranks, 2 on each host"),
                    HasSubstr("Use one of 1, 2, 4.")));
  EXPECT_THAT(refusal({1, 3}, hybrid(config(1), 2)), HasSubstr("mics_shard_size is 2"));
}

}  // namespace
}  // namespace zero
