// Parameters that each of several hosts keeps from one update to the next
// (zero_hpz_partition_size), through the engine's public interface: results beside those of full
// sharding, memory and traffic beside the formulas, writes, saving, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/engine/worlds.h"
#include "tests/support/paper_traffic.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/partition/formulas.h"
#include "zero/partition/link_bytes.h"

namespace zero {
namespace {

using comm::Collective;
using testing::AllOf;
using testing::HasSubstr;

Config kept(Config c, int64_t ranks = 2) {
  c.hpz_partition_size = ranks;
  return c;
}

Config quantised(Config c) {
  c.quantised.weights = true;
  c.quantised.frozen_weights = true;
  c.quantised.gradients = true;
  return c;
}

// Once this sum is there, what was published before has left.
void wait_for_published(comm::Group& group) { group.all_reduce(torch::ones({1})).wait(); }

TEST(KeptParameters, GiveTheBitsOfFullSharding) {
  for (const bool bf16 : {false, true}) {
    for (const int64_t k : {1, 3}) {
      SCOPED_TRACE((bf16 ? "bf16, k " : "fp32, k ") + std::to_string(k));
      const auto c = clipped(3, bf16, k);
      expect_same(outcome_of(kTwoByTwo, kept(c)), outcome_of(kTwoByTwo, c));
      expect_same(outcome_of({2, 3}, kept(c, 3)), outcome_of({2, 3}, c));
      expect_same(outcome_of({3, 2}, kept(c)), outcome_of({3, 2}, c));
    }
  }
}

TEST(KeptParameters, LieOnceOnEachHostByTheFormulaAndTheLedger) {
  for (const bool quantise : {false, true}) {
    run_in(kTwoByTwo, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = kept(config(3, true));
      if (quantise) c = quantised(c);
      Engine engine(net, AdamW{}, c, group);
      train(engine, *net, 2);
      const auto formula = engine.memory_formula();
      const auto& ledger = *group->ledger();
      EXPECT_EQ(ledger.usage(Category::parameters).current, formula.parameters);
      EXPECT_EQ(ledger.usage(Category::gradients).peak, formula.gradients);
      EXPECT_EQ(ledger.usage(Category::optimizer).current, formula.optimizer);
      EXPECT_EQ(ledger.usage(Category::gathered_units).peak, 0);
      const int64_t psi = engine.layout().numel();
      EXPECT_EQ(formula.parameters, 2 * psi / 2 + (quantise ? 2 * psi / 4 : 0));
      int64_t content = 0;
      for (int64_t u = 0; u < engine.layout().unit_count(); ++u)
        content += engine.layout().unit(u).content;
      EXPECT_GT(psi, content);
      EXPECT_GT(formula.padding, 0);
      EXPECT_LT(formula.padding, formula.total());
    });
  }
}

TEST(KeptParameters, CrossBetweenHostsOnceAStepByTheFormula) {
  for (const bool bf16 : {false, true}) {
    for (const bool quantise : {false, true}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE((bf16 ? "bf16, k " : "fp32, k ") + std::to_string(k));
        run_in(kTwoByTwo, [&](auto group) {
          auto chain = std::make_shared<Chain>();
          auto c = kept(config(3, bf16, k));
          c.quantised.weights = c.quantised.gradients = quantise;
          c.unit_bytes = 64 * 64 * (bf16 ? 2 : 4);  // a weight each
          c.max_live_parameters = 0;                // each operator gathers its own
          Engine engine(chain, AdamW{}, c, group);
          const auto x =
              torch::ones({2, 64}, bf16 ? torch::kBFloat16 : torch::kFloat).requires_grad_();
          wait_for_published(*group);
          group->traffic().reset();
          for (int64_t i = 0; i < k; ++i) {
            engine.backward(chain->forward(x).mean());
            engine.step();
          }
          wait_for_published(*group);
          const auto formula = engine.traffic_formula();
          const auto gathers = group->traffic().count(Collective::all_gather);
          EXPECT_EQ(gathers.link_bytes, formula.all_gather_link);
          EXPECT_EQ(group->traffic().count(Collective::reduce_scatter).link_bytes,
                    formula.reduce_scatter_link);
          // ZeRO++, section 3: M + M + M, and k times that, become M + k M.
          const auto wire = [&](int64_t bits) {
            return quantise ? partition::Wire{.bits = bits, .block = c.quantised.block}
                            : partition::Wire{.bits = bf16 ? 16 : 32};
          };
          const auto whole = paper::link_traffic({2, 2}, engine.layout().numel(),
                                                 {.sharding = partition::sharding_of_stage(3),
                                                  .kept = true,
                                                  .micro_batches = k,
                                                  .parameters = wire(8),
                                                  .gradients = wire(4)});
          EXPECT_EQ(formula.all_gather_link * 2, whole.gather);
          EXPECT_EQ(formula.reduce_scatter_link * 2, whole.reduce);
          EXPECT_EQ(gathers.logical_bytes, formula.all_gather);
        });
      }
    }
  }
}

TEST(KeptParameters, FrozenOnesDoNotCrossAgain) {
  run_in(kTwoByTwo, [](auto group) {
    auto net = std::make_shared<Net>();
    for (auto& p : net->parameters()) p.set_requires_grad(false);
    net->c->weight.set_requires_grad(true);
    Engine engine(net, AdamW{}, kept(config(3)), group);
    train(engine, *net, 1);
    wait_for_published(*group);
    group->traffic().reset();
    train(engine, *net, 1);
    wait_for_published(*group);
    EXPECT_EQ(group->traffic().count(Collective::all_gather).link_bytes,
              engine.traffic_formula().all_gather_link);
  });
}

TEST(KeptParameters, ThatAreWrittenReachEveryHost) {
  for (const bool quantise : {false, true}) {
    run_in(kTwoByTwo, [&](auto group) {
      auto net = std::make_shared<Net>();
      net->b->bias.set_requires_grad(false);
      auto c = kept(config(3));
      if (quantise) c = quantised(c);
      Engine engine(net, AdamW{}, c, group);
      train(engine, *net, 1);
      const auto expect_all = [&](const char* name, const at::Tensor& parameter, double value) {
        EXPECT_TRUE(torch::equal(engine.parameter(name), torch::full_like(parameter, value)));
        const torch::NoGradGuard guard;
        // As an operator reads it.
        EXPECT_NEAR((parameter + 0).mean().template item<double>(), value, quantise ? 0.02 : 0);
      };
      engine.set_parameter("a.bias", torch::full({33}, 0.5));
      expect_all("a.bias", net->a->bias, 0.5);
      // In place, on every rank, of a parameter that no update would show.
      {
        const torch::NoGradGuard guard;
        net->b->bias.fill_(0.25);
      }
      engine.backward(loss_of(*net, group->rank(), 1));
      engine.step();
      expect_all("b.bias", net->b->bias, 0.25);
    });
  }
}

TEST(KeptParameters, AreSavedAndResumedWithOrWithoutBeingKept) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::vector<at::Tensor> uninterrupted;
  const auto c = clipped(3, true);
  run_in(kTwoByTwo, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, kept(c), group);
    train(engine, *net, 2);
    engine.save(folder.path() / "sharded");
    train(engine, *net, 2, 2);
    const auto all = weights(engine);
    const std::lock_guard lock(mutex);
    uninterrupted = all;
  });
  for (const auto& with : {c, kept(c)}) {
    run_in(kTwoByTwo, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, with, group);
      engine.load(folder.path() / "sharded");
      train(engine, *net, 2, 2);
      expect_equal(weights(engine), uninterrupted);
    });
  }
}

TEST(KeptParameters, GoWithTheirEngineWhichAnotherMayReplace) {
  run_in(kTwoByTwo, [](auto group) {
    for (int round = 0; round < 3; ++round) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, kept(config(3)), group);
      train(engine, *net, 1);
    }
    group->barrier("all engines are gone");
    EXPECT_EQ(group->ledger()->usage(Category::parameters).current, 0);
  });
}

TEST(KeptParameters, AreRefusedWhereTheyDoNotSuitTheHosts) {
  EXPECT_THAT(refusal(kTwoByTwo, kept(config(3), 4)),
              AllOf(HasSubstr("zero_hpz_partition_size is 4"), HasSubstr("2 ranks on each host"),
                    HasSubstr("Use 2, or leave it out")));
  EXPECT_THAT(refusal({1, 3}, kept(config(3))), HasSubstr("Use 3, or leave it out"));
  EXPECT_NO_THROW(outcome_of({1, 3}, kept(config(3), 3)));
  auto elsewhere = kept(config(3));
  elsewhere.offload_param.device = OffloadDevice::cpu;
  EXPECT_THAT(refusal(kTwoByTwo, elsewhere),
              AllOf(HasSubstr("zero_hpz_partition_size is 2 on 2 hosts"),
                    HasSubstr("offload_param"), HasSubstr("Leave one of them out")));
}

}  // namespace
}  // namespace zero
