// The engine through its public interface, ranks as threads: memory and traffic against the
// formulas, states by name, saving and loading, groups, frozen and absent gradients, errors.
#include "zero/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <latch>
#include <limits>

#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "tests/support/paper_traffic.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/group.h"
#include "zero/engine/gathered.h"
#include "zero/models/layers/linear.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

using comm::Collective;
using comm::run_as_threads;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct Setting {
  int stage;
  int ranks;
  bool bf16;
  int64_t accumulate;
};
class EngineFormulas : public testing::TestWithParam<Setting> {};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (int stage = 0; stage <= 3; ++stage) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const bool bf16 : {false, true}) {
        for (const int64_t k : {1, 3}) all.push_back({stage, ranks, bf16, k});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, EngineFormulas, testing::ValuesIn(settings()), [](const auto& info) {
  return "stage" + std::to_string(info.param.stage) + "ranks" + std::to_string(info.param.ranks) +
         (info.param.bf16 ? "bf16" : "fp32") + "k" + std::to_string(info.param.accumulate);
});

TEST_P(EngineFormulas, MemoryOfTheStatesIsTheFormulaPlusPaddingByTheLedger) {
  const auto [stage, ranks, bf16, k] = GetParam();
  run_as_threads(ranks, [&, stage = stage, ranks = ranks, bf16 = bf16, k = k](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(stage, bf16, k), group);
    train(engine, *net, 2);
    const auto& ledger = *group->ledger();
    const auto formula = engine.memory_formula();
    EXPECT_EQ(ledger.usage(Category::parameters).current, formula.parameters);
    EXPECT_EQ(ledger.usage(Category::gradients).peak, formula.gradients);
    EXPECT_EQ(ledger.usage(Category::optimizer).current, formula.optimizer);
    EXPECT_EQ(ledger.usage(Category::optimizer).peak, formula.optimizer);
    // The formula must be the paper's over the padded elements, which is computed here
    // independently.
    int64_t padded = 0;
    for (const auto& unit : engine.layout().units()) padded += unit.numel;
    const bool alone = ranks == 1;
    const auto share = [&](bool sharded) { return sharded && !alone ? padded / ranks : padded; };
    EXPECT_EQ(formula.parameters, (bf16 ? 2 : 4) * share(stage >= 3));
    EXPECT_EQ(formula.gradients, (bf16 && k == 1 ? 2 : 4) * share(stage >= 2));
    EXPECT_EQ(formula.optimizer, (bf16 ? 12 : 8) * share(stage >= 1));
    EXPECT_LT(formula.padding, formula.total());
  });
}

TEST_P(EngineFormulas, BytesSentAreTheFormula) {
  const auto [stage, ranks, bf16, k] = GetParam();
  run_as_threads(ranks, [&, stage = stage, ranks = ranks, bf16 = bf16, k = k](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(stage, bf16, k);
    c.max_live_parameters = 0;
    Engine engine(net, AdamW{}, c, group);
    train(engine, *net, 1);
    group->traffic().reset();
    const auto before =
        engine.pager() != nullptr ? engine.pager()->counts() : paging::PagerCounts{};
    train(engine, *net, 1, 1);
    int64_t psi = 0;
    for (const auto& unit : engine.layout().units()) psi += unit.numel;
    const int64_t once = psi / ranks * (ranks - 1);  // Psi (N-1)/N elements
    const int64_t wire = bf16 ? 2 : 4;
    const bool alone = ranks == 1;
    const auto gathered = group->traffic().count(Collective::all_gather).logical_bytes;
    const auto scattered = group->traffic().count(Collective::reduce_scatter).logical_bytes;
    const auto reduced = group->traffic().count(Collective::all_reduce).logical_bytes;
    const int64_t boundary_wire =
        bf16 && k > 1 ? 4 : wire;  // accumulated in fp32 before it is sent
    EXPECT_EQ(reduced, stage == 0 ? 2 * once * boundary_wire : 0);
    EXPECT_EQ(scattered, alone || stage == 0 ? 0
                         : stage == 1        ? once * boundary_wire
                                             : once * wire * k);
    if (stage < 3) {
      EXPECT_EQ(gathered, stage == 0 ? 0 : once * wire);
      EXPECT_EQ(engine.traffic_formula().all_gather, gathered);
    }
    if (stage == 3 && ranks > 1) {
      const auto after = engine.pager()->counts();
      EXPECT_EQ(gathered, (after.gathered_bytes - before.gathered_bytes) / ranks * (ranks - 1));
    }
    const auto formula = engine.traffic_formula();
    EXPECT_EQ(formula.reduce_scatter, scattered);
    EXPECT_EQ(formula.all_reduce, reduced);
    EXPECT_EQ(group->traffic().count(Collective::broadcast).calls, 0);
    EXPECT_EQ(group->traffic().count(Collective::all_to_all).calls, 0);
  });
}

TEST(EngineTraffic, StageThreeMovesExactlyThreePsiAMicroBatchWithForcedRelease) {
  for (const int64_t k : {1, 2}) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Chain>();
      Config c;
      c.stage = 3;
      c.unit_bytes = 64 * 64 * 4;
      c.max_live_parameters = 0;
      c.gradient_accumulation_steps = k;
      Engine engine(net, AdamW{}, c, group);
      const auto x = torch::ones({2, 64}).requires_grad_();
      group->traffic().reset();
      for (int64_t i = 0; i < k; ++i) {
        engine.backward(net->forward(x).mean());
        engine.step();
      }
      const int64_t psi_bytes = 4 * 64 * 64 * 4;
      EXPECT_EQ(group->traffic().count(Collective::all_gather).logical_bytes,
                2 * k * psi_bytes / 2);
      EXPECT_EQ(group->traffic().count(Collective::reduce_scatter).logical_bytes,
                k * psi_bytes / 2);
      EXPECT_EQ(group->traffic().total().logical_bytes, 3 * k * psi_bytes / 2);
      EXPECT_EQ(engine.traffic_formula().all_gather + engine.traffic_formula().reduce_scatter,
                3 * k * psi_bytes / 2);
    });
  }
}

TEST(EngineTraffic, BetweenHostsIsTheFormula) {
  struct World {
    int hosts, ranks_a_host;
  };
  for (const auto [hosts, ranks_a_host] : {World{2, 1}, World{2, 2}, World{3, 1}}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const bool bf16 : {false, true}) {
        if (stage == 0 && bf16) continue;  // few bytes
        for (const int64_t k : {1, 2}) {
          comm::run_as_hosts(
              hosts, ranks_a_host, [&, hosts = hosts, ranks_a_host = ranks_a_host](auto group) {
                auto net = std::make_shared<Chain>();
                auto c = config(stage, bf16, k);
                c.max_live_parameters = 0;
                // Stage 3: each unit is used once forward and once backward. Else one large one,
                // since an all-reduce of few bytes sends them whole.
                c.unit_bytes = stage == 3 ? 64 * 64 * (bf16 ? 2 : 4) : 1 << 20;
                Engine engine(net, AdamW{}, c, group);
                const auto x =
                    torch::ones({2, 64}, bf16 ? torch::kBFloat16 : torch::kFloat).requires_grad_();
                group->traffic().reset();
                for (int64_t i = 0; i < k; ++i) {
                  engine.backward(net->forward(x).mean());
                  engine.step();
                }
                const auto formula = engine.traffic_formula();
                const auto sent = [&](Collective of) {
                  return group->traffic().count(of).link_bytes;
                };
                EXPECT_EQ(sent(Collective::all_gather), formula.all_gather_link);
                EXPECT_EQ(sent(Collective::reduce_scatter), formula.reduce_scatter_link);
                EXPECT_EQ(sent(Collective::all_reduce), formula.all_reduce_link);
                // The formulas of `partition` for the whole model; sums over micro-batches that are
                // kept whole (stages 0 and 1) are fp32.
                const partition::Cluster cluster{hosts, ranks_a_host};
                const partition::Wire wire{bf16 ? 16 : 32};
                int64_t psi = 0;
                for (const auto& unit : engine.layout().units()) psi += unit.numel;
                const auto whole = paper::link_traffic(
                    cluster, psi,
                    {.sharding = partition::sharding_of_stage(stage),
                     .micro_batches = k,
                     .parameters = wire,
                     .gradients = stage < 2 && k > 1 ? partition::kWireFp32 : wire});
                EXPECT_EQ((formula.all_gather_link + formula.reduce_scatter_link +
                           formula.all_reduce_link) *
                              ranks_a_host,
                          whole.total())
                    << hosts << " x " << ranks_a_host << ", stage " << stage << ", k " << k;
              });
        }
      }
    }
  }
}

TEST(EngineTraffic, StageThreeWithTheWholeModelAsBudgetMovesWhatStageTwoMoves) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3), group);
    train(engine, *net, 1);
    group->traffic().reset();
    train(engine, *net, 1, 1);
    int64_t psi = 0;
    for (const auto& unit : engine.layout().units()) psi += unit.bytes();
    EXPECT_EQ(group->traffic().total().logical_bytes, 2 * (psi / 2));
  });
}

// Gathers follow the plan, whose optimum tests/paging/plan_test.cpp proves; what comes
// out of it depends neither on the budget, nor on gathering ahead, nor on how a unit is gathered.
TEST(EngineTraffic, StageThreeGathersWhatThePlanSaysWithTheSameResultForEveryBudget) {
  std::mutex mutex;
  std::vector<at::Tensor> results;
  for (const bool in_place : {true, false}) {
    for (const int64_t prefetch : {0, 2000}) {
      for (const int64_t live : {0, 400, 1000, 1800, 1 << 20}) {
        run_as_threads(3, [&](auto group) {
          auto net = std::make_shared<Net>();
          auto c = config(3, false, 2);
          c.max_live_parameters = live;
          c.prefetch_bucket_size = prefetch;
          c.one_sided_gather = in_place;
          Engine engine(net, AdamW{}, c, group);
          train(engine, *net, 1);
          for (int64_t step = 1; step < 4; ++step) {
            group->traffic().reset();
            train(engine, *net, 1, step);
            const auto gathered = group->traffic().count(Collective::all_gather);
            const auto* plan = engine.pager()->plan();
            EXPECT_EQ(gathered.logical_bytes, plan->gathered_bytes / 3 * 2);
            EXPECT_EQ(gathered.calls, static_cast<int64_t>(plan->gathers.size()));
            EXPECT_EQ(gathered.copied_bytes == 0, in_place);
          }
          const auto weight = engine.parameter("b.weight");
          if (group->rank() != 0) return;
          const std::lock_guard lock(mutex);
          results.push_back(weight);
        });
      }
    }
  }
  ASSERT_EQ(results.size(), 20U);
  for (const auto& result : results) EXPECT_TRUE(at::equal(result, results.front()));
}

TEST(EngineMemory, UnitsThatAreReadInPlaceTakeNoMemory) {
  run_as_threads(3, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3), group);
    train(engine, *net, 3);
    EXPECT_EQ(group->ledger()->usage(Category::gathered_units).peak, 0);
  });
}

TEST(EngineMemory, GatheredUnitsStayWithinTheBudgetOrWhatOneOperatorPins) {
  for (const int64_t live : {0, 1200, 1 << 20}) {
    run_as_threads(3, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = config(3);
      c.max_live_parameters = live;
      c.one_sided_gather = false;
      Engine engine(net, AdamW{}, c, group);
      group->ledger()->reset_peaks();
      train(engine, *net, 3);
      // A linear layer's weight and bias are pinned together: at most two units.
      int64_t pair = 0;
      for (const auto* layer : {"a", "b", "c"}) {
        const auto names = engine.parameter_names();
        const auto index = [&](const std::string& name) {
          return std::find(names.begin(), names.end(), name) - names.begin();
        };
        const auto w = engine.layout().unit_of(index(std::string(layer) + ".weight"));
        const auto b = engine.layout().unit_of(index(std::string(layer) + ".bias"));
        pair = std::max(
            pair, engine.layout().unit(w).bytes() + (w == b ? 0 : engine.layout().unit(b).bytes()));
      }
      EXPECT_LE(group->ledger()->usage(Category::gathered_units).peak, std::max(live * 4, pair));
      EXPECT_GT(group->ledger()->usage(Category::gathered_units).peak, 0);
    });
  }
}

TEST(EngineMemory, GivesBackWhatTheModelHeld) {
  constexpr int64_t kWidth = 2048;  // 16 MiB a weight
  constexpr int64_t kHugePage = 2 << 20;
  install_host_allocator();
  const auto memory = [] { return HostAllocator::instance().usage(); };
  for (const int stage : {0, 3}) {
    run_as_threads(2, [&](auto group) {
      group->barrier("before");
      HostAllocator::instance().reset_peaks();
      group->barrier("counting");
      torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth),
                                torch::nn::Linear(kWidth, kWidth));
      group->barrier("built");
      const auto model = memory().used.current;  // of both ranks
      EXPECT_GE(model, 2 * 2 * kWidth * kWidth * 4);
      group->barrier("counted");
      Engine engine(net, Sgd{.lr = 0.1}, config(stage), group);
      group->barrier("made");
      // States are not among what is used; huge pages that hold both are.
      EXPECT_LT(memory().reserved.current - memory().used.current, 8 * kHugePage);
      EXPECT_LT(memory().reserved.peak, model);
      group->barrier("looked");
    });
  }
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kKeepsFreedMemory = true;
#else
constexpr bool kKeepsFreedMemory = false;
#endif

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

TEST(EngineMemory, AThousandStepsDoNotGrowTheResidentSet) {
  for (const int stage : {0, 1, 2, 3}) {
    // The least of three spans: what a step keeps grows in all of them, the system's huge pages in
    // one.
    int64_t growth = std::numeric_limits<int64_t>::max();
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, config(stage), group);
      int64_t done = 100;
      train(engine, *net, done);
      for (int span = 0; span < 3; ++span) {
        group->barrier();
        const int64_t before = resident_bytes();
        group->barrier();
        train(engine, *net, 400, done);
        done += 400;
        group->barrier();
        if (group->rank() == 0) growth = std::min(growth, resident_bytes() - before);
      }
    });
    // 300 bytes a step. AddressSanitizer keeps what is freed for a while, and finds what is never
    // freed by itself.
    EXPECT_LT(growth, kKeepsFreedMemory ? int64_t{1} << 30 : 120'000) << "stage " << stage;
  }
}

TEST(EngineMemory, StagingBuffersDoNotGrowWithTheModel) {
  const auto staging = [](int64_t width, int stage) {
    int64_t bytes = 0;
    run_as_threads(2, [&](auto group) {
      auto net =
          std::make_shared<nn::SequentialImpl>(nn::Linear(width, width), nn::Linear(width, width));
      auto c = config(stage);
      c.unit_bytes = 1 << 20;
      Engine engine(net, Sgd{.lr = 1e-3}, c, group);
      for (int i = 0; i < 2; ++i) {
        engine.backward(net->forward(torch::ones({1, width})).mean());
        engine.step();
      }
      if (group->rank() > 0) return;
      bytes = group->ledger()->usage(Category::communication).peak;
      // Beside them the ranks share each unit's epoch.
      if (stage == 3) bytes -= engine.layout().unit_count() * int64_t{sizeof(uint64_t)};
    });
    return bytes;
  };
  for (int stage = 0; stage <= 3; ++stage) {
    const auto small = staging(64, stage);
    EXPECT_GT(small, 0);
    EXPECT_EQ(small, staging(2500, stage)) << "stage " << stage;  // 12.5 million parameters
  }
}

// A parameter that is a unit by itself, and one that shares its unit with another.
struct Tables : nn::Module {
  Tables()
      : large(register_parameter("large", torch::sin(torch::arange(kLarge)).view({64, -1}))),
        small(register_parameter("small", torch::cos(torch::arange(4096)).view({64, -1}))),
        other(register_parameter("other", torch::cos(torch::arange(64)))) {}
  at::Tensor loss(int rank, int64_t step) {
    const auto x =
        torch::sin(torch::arange(64) + rank + static_cast<double>(step)).to(large.scalar_type());
    return (torch::mv(large.t(), x).pow(2).mean() + torch::mv(small.t(), x * other).pow(2).mean())
        .to(at::kFloat);
  }
  static constexpr int64_t kLarge = int64_t{1} << 19;
  at::Tensor large, small, other;
};

TEST(EngineMemory, SlicesOfGradientsLiveFromTheirReductionToTheUpdate) {
  install_host_allocator();
  for (const bool bf16 : {false, true}) {
    for (const int64_t k : {1, 2}) {
      std::vector<std::vector<at::Tensor>> results;
      for (int stage = 0; stage <= 3; ++stage) {
        run_as_threads(2, [&](auto group) {
          auto net = std::make_shared<Tables>();
          auto c = config(stage, bf16, k);
          c.unit_bytes = 64 << 10;
          c.gradient_clipping = 0.5;
          Engine engine(net, AdamW{.lr = 1e-2}, c, group);
          const auto gradients = [&] { return group->ledger()->usage(Category::gradients); };
          const auto formula = engine.memory_formula().gradients;
          for (int64_t i = 0; i < 3 * k; ++i) {
            if (stage >= 2 && i % k == 0) {
              EXPECT_EQ(gradients().current, 0);
            }
            engine.backward(net->loss(group->rank(), i));
            if (i % k == k - 1) engine.gradient("small");  // completes the reductions
            if (stage >= 2 && i % k == k - 1) {
              EXPECT_EQ(gradients().current, formula);
            }
            engine.step();
          }
          EXPECT_EQ(gradients().peak, formula);
          const auto now = weights(engine);
          if (group->rank() == 0) results.push_back(now);
        });
      }
      // With accumulation stages 0 and 1 add up in another order than 2 and 3.
      for (int stage = 1; stage <= 3; ++stage) {
        if (k == 1 || stage != 2)
          expect_equal(results[static_cast<size_t>(stage)],
                       results[static_cast<size_t>(stage - 1)]);
      }
    }
  }
}

// A sum that is added to those of earlier micro-batches is wider than the bf16 bucket that it came
// in, but is a slice.
TEST(EngineMemory, TwoBucketsAreHeldAndASliceBesideEach) {
  run_as_threads(4, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(2, true, 3);
    c.unit_bytes = 1 << 20;
    Engine engine(net, AdamW{}, c, group);
    train(engine, *net, 3);
    ASSERT_EQ(engine.layout().unit_count(), 1);
    const auto bucket = engine.layout().unit(0).bytes();
    EXPECT_LE(group->ledger()->usage(Category::gradient_buckets).peak,
              2 * (bucket + engine.layout().slice_numel(0) * 4));
  });
}

TEST(EngineMemory, EverythingIsGivenBackWhenTheEngineEnds) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{}, config(stage, true, 2), group);
        train(engine, *net, 2);
      }
      for (const auto category : {Category::parameters, Category::gradients, Category::optimizer,
                                  Category::gathered_units, Category::gradient_buckets}) {
        EXPECT_EQ(group->ledger()->usage(category).current, 0)
            << name(category) << ", stage " << stage;
      }
    });
  }
}

TEST(EngineStates, AreReadableAndWritableByNameAtEveryStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      run_as_threads(3, [&](auto group) {
        auto net = std::make_shared<Net>();
        const auto original = net->b->weight.detach().clone();
        Engine engine(net, AdamW{}, config(stage, bf16), group);
        EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), original))
            << "the master keeps fp32";
        engine.backward(loss_of(*net, group->rank(), 0));
        // The mean over ranks of what each rank alone would have computed.
        const auto gradient = engine.gradient("a.bias");
        EXPECT_EQ(gradient.sizes(), net->a->bias.sizes());
        EXPECT_GT(gradient.abs().max().template item<float>(), 0);
        engine.set_gradient("a.bias", torch::full({33}, 0.5));
        engine.set_gradient("b.weight", {});  // it has none, and stays
        EXPECT_FALSE(engine.gradient("b.weight").defined());
        EXPECT_TRUE(torch::allclose(engine.gradient("a.bias"), torch::full({33}, 0.5), 1e-2, 0));
        EXPECT_TRUE(engine.step().updated);
        EXPECT_TRUE(torch::allclose(engine.optimizer_state("a.bias", "exp_avg"),
                                    torch::full({33}, 0.05), 1e-2, 0));
        EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), original));
        EXPECT_EQ(engine.parameter_steps("b.weight"), 0);
        const auto value = torch::arange(33 * 29).view({29, 33}).to(at::kFloat) * 0.001;
        engine.set_parameter("b.weight", value);
        EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), value));
        EXPECT_TRUE(torch::equal(net->b->weight.detach().to(at::kFloat).clone(),
                                 value.to(bf16 ? at::kBFloat16 : at::kFloat).to(at::kFloat)));
        engine.set_optimizer_state("b.weight", "exp_avg_sq", value);
        EXPECT_TRUE(torch::equal(engine.optimizer_state("b.weight", "exp_avg_sq"), value));
        EXPECT_THROW(engine.parameter("b.wieght"), ConfigError);
        EXPECT_THROW(engine.optimizer_state("b.weight", "exp_average"), ConfigError);
        EXPECT_THROW(engine.set_parameter("b.weight", torch::zeros({3})), ConfigError);
      });
    }
  }
}

TEST(EngineStates, WritesOfTheUserReachTheMasterWeightsAndThePeers) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, Sgd{.lr = 0.0}, config(stage, bf16), group);
        const auto before = engine.parameter("b.weight");
        {
          const torch::NoGradGuard guard;
          net->a->weight.fill_(0.25);
        }
        train(engine, *net, 1);
        EXPECT_TRUE(torch::equal(engine.parameter("a.weight"), torch::full({33, 7}, 0.25)));
        EXPECT_TRUE(torch::equal(net->a->weight.detach().to(at::kFloat).clone(),
                                 torch::full({33, 7}, 0.25)));
        EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), before))
            << "what nobody wrote keeps the master's bits";
        {
          Gathered scope(engine, {net->c->weight, net->c->bias}, Gathered::Access::write, 1);
          if (group->rank() == 1) {
            if (bf16) {
              std::fill_n(net->c->weight.data_ptr<at::BFloat16>(), 29, at::BFloat16(3.0F));
            } else {
              std::fill_n(net->c->weight.data_ptr<float>(), 29, 3.0F);  // raw memory
            }
          }
        }
        EXPECT_TRUE(torch::equal(engine.parameter("c.weight"), torch::full({1, 29}, 3.0)));
        EXPECT_TRUE(torch::equal(net->c->weight.detach().to(at::kFloat).clone(),
                                 torch::full({1, 29}, 3.0)));
        EXPECT_THROW(Gathered(engine, {torch::zeros({3})}), ConfigError);
      });
    }
  }
}

// Its parameter is address space alone until somebody writes it.
struct Huge : nn::Module {
  explicit Huge(int64_t numel) { register_parameter("weight", torch::empty({numel})); }
};

TEST(EngineMemory, StatesThatTheHostHasNoMemoryForAreRefusedBeforeAnyIsMade) {
  // The model holds 4 of the 16 bytes for each element.
  const int64_t numel = available_memory().available / 10;
  EXPECT_THAT([&] { Engine(std::make_shared<Huge>(numel), AdamW{}, config(0)); },
              ThrowsMessage<OutOfMemory>(AllOf(HasSubstr("The states of the model take"),
                                               HasSubstr("are left for each"),
                                               HasSubstr("offload_optimizer"))));
}

TEST(EngineSave, ResumesBitExactlyAtEveryStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    const TemporaryFolder folder;
    run_as_threads(3, [&](auto group) {
      std::vector<at::Tensor> expected;
      {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage, true), group);
        train(engine, *net, 2);
        engine.save(folder.path() / "run");
        engine.save(folder.path() / "run");  // over an earlier one
        train(engine, *net, 2, 2);
        expected = weights(engine);
      }
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage, true), group);
      train(engine, *net, 1);  // something else, to be overwritten
      engine.load(folder.path() / "run");
      EXPECT_EQ(engine.steps(), 2);
      train(engine, *net, 2, 2);
      expect_equal(weights(engine), expected);
      EXPECT_FALSE(std::filesystem::exists(folder.path() / "run.partial"));
      EXPECT_FALSE(std::filesystem::exists(folder.path() / "run.earlier"));
    });
  }
}

TEST(EngineSave, TakesAFolderWithASeparatorAtItsEnd) {
  const TemporaryFolder folder;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(1), group);
    const auto path = (folder.path() / "parent" / "run").string();
    engine.save(path + "/");
    engine.save(path + "//.");
    engine.save(folder.path().string() + "/parent/./../parent/run/");
    engine.load(path);
    for (const auto* none : {"", ".", "/", "//", "./", "a/.."})
      EXPECT_THROW(engine.save(none), CheckpointError) << none;
    group->barrier("all have saved");
  });
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "parent"))
    left.push_back(entry.path().filename());
  EXPECT_EQ(left, std::vector<std::string>{"run"});
}

TEST(EngineSave, TakesThePlaceOfAnEarlierSaveAlone) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "results";
  std::filesystem::create_directories(path);
  std::ofstream(path / "log.txt") << "of another program";
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(1), group);
    const auto refusal = [&] { return message_of<CheckpointError>([&] { engine.save(path); }); };
    EXPECT_THAT(refusal(), HasSubstr("log.txt"));
    group->barrier("all were refused");
    if (group->rank() == 0) {
      EXPECT_TRUE(std::filesystem::exists(path / "log.txt"));
      std::filesystem::remove(path / "log.txt");
    }
    group->barrier("the folder is empty");
    engine.save(path);
    if (group->rank() == 0) std::ofstream(path / "notes.json") << "{}";  // beside the shards
    group->barrier("noted");
    engine.save(path);
    if (group->rank() == 0) {
      EXPECT_FALSE(std::filesystem::exists(path / "notes.json"));
      std::filesystem::create_directory(path / "another");
    }
    group->barrier("a folder is there");
    EXPECT_THAT(refusal(), HasSubstr("another"));
    group->barrier("all were refused");
    engine.load(path);
  });
}

TEST(EngineSave, ALoadInTheMiddleOfAnAccumulationDropsIt) {
  const TemporaryFolder folder;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage, bf16, 3), group);
        const auto path = (folder.path() / std::to_string(stage)).string();
        train(engine, *net, 1);
        engine.save(path);
        train(engine, *net, 1, 1);
        const auto expected = weights(engine);
        engine.load(path);
        for (int i = 0; i < 2; ++i) {  // the second is added to the first
          engine.backward(loss_of(*net, group->rank(), 7));
          engine.step();
        }
        engine.load(path);
        train(engine, *net, 1, 1);
        expect_equal(weights(engine), expected);
      });
    }
  }
}

TEST(EngineSave, FullStatesLoadAtAnyStageAndNumberOfRanks) {
  const TemporaryFolder folder;
  const auto file = (folder.path() / "full.safetensors").string();
  std::vector<at::Tensor> expected;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(3), group);
    train(engine, *net, 3);
    engine.save_full(file);
    auto now = weights(engine);
    if (group->rank() == 0) expected = std::move(now);
  });
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int ranks : {1, 3}) {
      run_as_threads(ranks, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
        engine.load_full(file);
        EXPECT_EQ(engine.steps(), 3);
        expect_equal(weights(engine), expected);
        EXPECT_TRUE(engine.optimizer_state("b.bias", "exp_avg").abs().max().template item<float>() >
                    0);
      });
    }
  }
}

TEST(EngineSave, AWrongCheckpointIsAnErrorOnEveryRankAndChangesNothing) {
  const TemporaryFolder folder;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(2), group);
    engine.save(folder.path() / "run");
    train(engine, *net, 2);
    const auto before = weights(engine);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(folder.path() / "absent"); }),
                HasSubstr("does not exist"));
    if (group->rank() == 1) {
      const auto file = folder.path() / "run" / "rank-1-of-2.safetensors";
      std::filesystem::resize_file(file, std::filesystem::file_size(file) - 8);
    }
    group->barrier();
    const auto message = message_of<CheckpointError>([&] { engine.load(folder.path() / "run"); });
    EXPECT_THAT(message, HasSubstr("rank-1-of-2")) << message;
    expect_equal(weights(engine), before);
    EXPECT_EQ(engine.steps(), 2);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.save("/proc/cannot/be/made"); }),
                HasSubstr(group->rank() == 0 ? "/proc/cannot" : "rank 0"));
    // The corrections of Adam's bias, which count steps, are those of now too.
    train(engine, *net, 1, 2);
    auto other = std::make_shared<Net>();
    Engine undisturbed(other, AdamW{}, config(2), group);
    train(undisturbed, *other, 3);
    expect_equal(weights(engine), weights(undisturbed));
  });
}

TEST(EngineGradients, AbsentOnSomeRanksAreZerosAndOnAllRanksAreSkipped) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 0.1, .weight_decay = 0.5}, config(stage), group);
      const auto before_c = engine.parameter("c.weight");
      const auto before_a = engine.parameter("a.weight");
      const auto x = input(0, 0, at::kFloat);
      // Only rank 0 uses layer a; nobody uses b and c.
      const auto loss =
          group->rank() == 0 ? net->a(x).pow(2).mean() : (net->a->bias.sum() * 0).sum();
      engine.backward(loss);
      EXPECT_FALSE(engine.gradient("c.weight").defined());
      EXPECT_TRUE(engine.gradient("a.weight").defined());
      EXPECT_TRUE(engine.step().updated);
      EXPECT_TRUE(torch::equal(engine.parameter("c.weight"), before_c)) << "no decay, no moments";
      EXPECT_TRUE(
          torch::equal(engine.optimizer_state("c.weight", "exp_avg"), torch::zeros({1, 29})));
      EXPECT_FALSE(torch::equal(engine.parameter("a.weight"), before_a));
    });
  }
}

TEST(EngineGradients, SeveralBackwardCallsAddUpAndGradIsEmptyAfterwards) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, config(stage), group);
      engine.backward(loss_of(*net, group->rank(), 0));
      engine.backward(loss_of(*net, group->rank(), 1));
      for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
      const auto both = engine.gradient("b.weight");
      auto other = std::make_shared<Net>();
      Engine reference(other, AdamW{}, config(stage, false, 2), group);
      for (int i = 0; i < 2; ++i) reference.backward(loss_of(*other, group->rank(), i));
      EXPECT_TRUE(torch::allclose(both, reference.gradient("b.weight") * 2, 1e-5, 1e-8));
      engine.step();
      reference.step();
    });
  }
}

TEST(EngineGradients, NonFiniteOnOneRankSkipsTheUpdateOnAll) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, config(stage), group);
      const auto before = weights(engine);
      auto loss = loss_of(*net, group->rank(), 0);
      if (group->rank() == 1) loss = loss * std::numeric_limits<float>::infinity();
      engine.backward(loss);
      const auto result = engine.step();
      EXPECT_TRUE(result.boundary);
      EXPECT_FALSE(result.updated);
      expect_equal(weights(engine), before);
      train(engine, *net, 1);
      EXPECT_EQ(engine.steps(), 1);
    });
  }
}

// The same network by libzero's linear layer, which writes gradients where the engine collects
// them.
struct PlacingNet : Net {
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::tanh(linear(x, a->weight, a->bias));
    // b twice: its second gradient has no place, and is added.
    y = torch::tanh(
        linear(torch::tanh(linear(y, b->weight, b->bias)).narrow(1, 0, 1).expand({-1, 33}),
               b->weight, b->bias));
    return linear(y, c->weight, c->bias);
  }
};

struct CopyingNet : Net {
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::tanh(a(x));
    y = torch::tanh(b(torch::tanh(b(y)).narrow(1, 0, 1).expand({-1, 33})));
    return c(y);
  }
};

template <class Network>
std::vector<at::Tensor> trained(const Config& c, bool look) {
  std::vector<at::Tensor> result;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Network>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    const auto dtype = net->a->weight.scalar_type();
    for (int64_t i = 0; i < 4 * c.gradient_accumulation_steps; ++i) {
      const auto loss = [&] {
        return net->forward(input(group->rank(), i, dtype)).to(at::kFloat).pow(2).mean();
      };
      at::Tensor kept;
      at::Tensor copy;
      if (look) {  // the user's own gradient, which must stay what it is
        kept = torch::autograd::grad({loss()}, {net->a->weight})[0];
        copy = kept.clone();
      }
      engine.backward(loss());
      engine.step();
      EXPECT_TRUE(!look || at::equal(kept, copy));
    }
    const auto values = weights(engine);
    if (group->rank() == 0) {
      for (const auto& value : values) result.push_back(value.clone());
    }
  });
  return result;
}

TEST(EngineGradients, WrittenInPlaceAreTheSameAsCopied) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 3}) {
        const auto c = config(stage, bf16, k);
        const auto expected = trained<CopyingNet>(c, false);
        for (const bool look : {false, true}) expect_equal(trained<PlacingNet>(c, look), expected);
      }
    }
  }
}

TEST(EngineGradients, TheUsersHooksAreChained) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    int tensor_hook = 0;
    net->a->weight.register_hook([&](const at::Tensor&) { ++tensor_hook; });
    Engine engine(net, AdamW{}, config(3), group);
    train(engine, *net, 2);
    EXPECT_EQ(tensor_hook, 2);
  });
}

TEST(EngineGroups, HaveTheirOwnHyperParameters) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net,
                    std::vector<ParameterGroup>{{{"a.bias", "b.bias"}, Sgd{.lr = 0.0}},
                                                {.optimizer = AdamW{.lr = 1e-2}, .rest = true},
                                                {.optimizer = Sgd{}}},
                    config(stage), group);
      const auto bias = engine.parameter("a.bias");
      const auto weight = engine.parameter("a.weight");
      train(engine, *net, 1);
      EXPECT_TRUE(torch::equal(engine.parameter("a.bias"), bias));
      EXPECT_FALSE(torch::equal(engine.parameter("a.weight"), weight));
      engine.set_lr(0.1, 0);
      EXPECT_EQ(engine.lr(0), 0.1);
      train(engine, *net, 1);
      EXPECT_FALSE(torch::equal(engine.parameter("a.bias"), bias));
      EXPECT_THROW(engine.set_lr(1, 7), ConfigError);
      for (const double bad : {-1.0, std::nan(""), HUGE_VAL})
        EXPECT_THROW(engine.set_lr(bad, 0), ConfigError);
      EXPECT_EQ(engine.lr(0), 0.1);
    });
  }
}

TEST(EngineGroups, TakeOtherHyperParametersFromTheNextUpdateOn) {
  const Sgd start{.lr = 0.1, .momentum = 0.5};
  const Sgd wanted{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1};
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto same = std::make_shared<Net>();
      Engine engine(net, start, config(stage), group);
      Engine reference(same, wanted, config(stage), group);
      engine.set_optimizer(wanted);
      EXPECT_EQ(engine.lr(), wanted.lr);
      train(engine, *net, 2);
      train(reference, *same, 2);
      EXPECT_TRUE(torch::equal(engine.parameter("a.weight"), reference.parameter("a.weight")));
      engine.set_lr(0.2);
      EXPECT_EQ(std::get<Sgd>(engine.optimizer()).lr, 0.2);
      EXPECT_EQ(std::get<Sgd>(engine.optimizer()).momentum, wanted.momentum);

      const auto refused = [&](const Optimizer& optimizer, const std::string& named) {
        EXPECT_THAT(message_of<ConfigError>([&] { engine.set_optimizer(optimizer); }),
                    ::testing::HasSubstr(named));
        EXPECT_EQ(std::get<Sgd>(engine.optimizer()).momentum, wanted.momentum);
      };
      refused(Sgd{.lr = 0.1}, "SGD with no states");
      refused(AdamW{}, "AdamW with exp_avg, exp_avg_sq");
      refused(Sgd{.lr = -1, .momentum = 0.9}, "lr");
    });
  }
}

TEST(EngineGroups, TakeOtherHyperParametersOfUpdatesOfTwoPasses) {
  const std::vector<std::pair<Optimizer, Optimizer>> changes{
      {Adafactor{.lr = 1e-2}, Adafactor{.lr = 1e-2, .eps2 = 1e-2, .d = 0.5}},
      {Muon{.lr = 1e-2}, Muon{.lr = 1e-2, .ns_steps = 2, .adam_lr = 1e-3, .beta1 = 0.5}},
      {Lamb{.lr = 1e-2}, Lamb{.lr = 1e-2, .min_coeff = 0.5, .max_coeff = 0.6}},
      {Apollo{.rank = 3}, Apollo{.rank = 3, .alpha = 2, .seed = 1, .adam_lr = 1e-3}}};
  for (const int stage : {0, 2}) {
    for (const auto& [start, wanted] : changes) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto same = std::make_shared<Net>();
        auto kept = std::make_shared<Net>();
        Engine engine(net, start, config(stage), group);
        Engine reference(same, wanted, config(stage), group);
        Engine other(kept, start, config(stage), group);
        engine.set_optimizer(wanted);
        train(engine, *net, 2);
        train(reference, *same, 2);
        train(other, *kept, 2);
        for (const auto* name : {"a.weight", "a.bias"}) {
          EXPECT_TRUE(torch::equal(engine.parameter(name), reference.parameter(name)))
              << optim::name(wanted) << " " << name;
        }
        EXPECT_FALSE(torch::equal(engine.parameter("a.weight"), other.parameter("a.weight")))
            << optim::name(wanted);
      });
    }
  }
}

TEST(EngineGroups, WhatMuonTrainsWithAdamWFollowsItsGroup) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, Muon{.lr = 0.02, .adam_lr = 0.01}, config(2), group);
    ASSERT_EQ(engine.group_count(), 2U);
    engine.set_lr(0.2);
    EXPECT_EQ(engine.lr(1), 0.1);
    engine.set_optimizer(engine.optimizer());
    EXPECT_EQ(engine.lr(0), 0.2);
    EXPECT_EQ(engine.lr(1), 0.1);
    engine.set_lr(0);  // a warm-up from 0
    engine.set_betas(0.8, 0.9);
    engine.set_lr(0.4);
    EXPECT_DOUBLE_EQ(engine.lr(1), 0.2);
    engine.set_lr(0.3, 1);
    EXPECT_EQ(engine.lr(0), 0.4);
    EXPECT_EQ(engine.lr(1), 0.3);
  });
}

TEST(EngineGroups, TakeOtherBetasFromTheNextUpdateOn) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      const AdamW wanted{.lr = 1e-2, .beta1 = 0.6, .beta2 = 0.95};
      auto net = std::make_shared<Net>();
      auto same = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
      Engine reference(same, wanted, config(stage), group);
      engine.set_betas(wanted.beta1, wanted.beta2);
      train(engine, *net, 2);
      train(reference, *same, 2);
      EXPECT_TRUE(torch::equal(engine.parameter("a.weight"), reference.parameter("a.weight")));
      engine.set_betas(0.9, 0.999);
      train(engine, *net, 1);
      train(reference, *same, 1);
      EXPECT_FALSE(torch::equal(engine.parameter("a.weight"), reference.parameter("a.weight")));
      EXPECT_THROW(engine.set_betas(1, 0.9), ConfigError);
      EXPECT_THROW(engine.set_betas(0.9, 0.9, 7), ConfigError);
      auto plain = std::make_shared<Net>();
      Engine sgd(plain, Sgd{.lr = 0.1}, config(stage), group);
      EXPECT_THROW(sgd.set_betas(0.9, 0.9), ConfigError);
    });
  }
}

TEST(EngineGroups, FrozenParametersHaveNoStatesAndStayAsTheyAre) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      net->b->weight.set_requires_grad(false);
      Engine engine(net, AdamW{.lr = 0.1}, config(stage), group);
      const auto frozen = engine.parameter("b.weight");
      train(engine, *net, 2);
      EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), frozen));
      EXPECT_THROW(engine.gradient("b.weight"), ConfigError);
      EXPECT_EQ(group->ledger()->usage(Category::optimizer).current,
                engine.memory_formula().optimizer);
    });
  }
}

TEST(EngineStart, RankZerosValuesAndBuffersAreGivenToAll) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(3, [&](auto group) {
      nn::Sequential net(nn::Linear(3, 5), nn::BatchNorm1d(5));
      {
        const torch::NoGradGuard guard;
        for (auto& p : net->parameters()) p.fill_(group->rank() + 1);
        for (auto& b : net->buffers()) b.fill_(group->rank() + 1);
      }
      Engine engine(net, AdamW{}, config(stage), group);
      EXPECT_TRUE(torch::equal(engine.parameter("0.weight"), torch::ones({5, 3})));
      for (const auto& b : net->buffers())
        EXPECT_EQ(b.to(at::kFloat).mean().template item<float>(), 1);
    });
  }
}

TEST(EngineStart, ADifferentModelOnOneRankIsAnErrorOnAll) {
  run_as_threads(2, [&](auto group) {
    nn::Linear net(3, group->rank() == 1 ? 4 : 5);
    EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, AdamW{}, config(2), group); }),
                HasSubstr("Rank 1 was given another model"));
  });
}

TEST(EngineStart, ADifferentOptimizerOnOneRankIsAnErrorOnAll) {
  run_as_threads(2, [&](auto group) {
    const std::vector<Optimizer> others{AdamW{.beta2 = 0.99}, Sgd{}};
    for (const auto& other : others) {
      auto net = std::make_shared<Net>();
      const auto optimizer = group->rank() == 1 ? other : Optimizer(AdamW{});
      EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, optimizer, config(2), group); }),
                  HasSubstr("Rank 1 was given another model or configuration"));
    }
  });
}

TEST(EngineStart, NonsenseIsRefusedByName) {
  auto net = std::make_shared<Net>();
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, config(0)); }),
              HasSubstr("optimizer"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Engine engine(net, std::vector<ParameterGroup>{{{"a.wieght"}, AdamW{}}}, config(0));
              }),
              HasSubstr("Did you mean 'a.weight'"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Engine engine(net, std::vector<ParameterGroup>{{{"a.weight"}, AdamW{}}}, config(0));
              }),
              HasSubstr("in no parameter group"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                Engine engine(net, std::vector<ParameterGroup>{{.optimizer = AdamW{}}}, config(0));
              }),
              HasSubstr("'a.weight' is in no parameter group"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                const ParameterGroup rest{.optimizer = AdamW{}, .rest = true};
                Engine engine(net, std::vector<ParameterGroup>{rest, rest}, config(0));
              }),
              HasSubstr("0 and 1 both take the rest"));
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, AdamW{}, config(4)); }),
              HasSubstr("stage"));
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, AdamW{.beta1 = 1}, config(0)); }),
              HasSubstr("beta1 is 1"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                auto c = config(0);
                c.optimizer = Sgd{.nesterov = true};
                Engine engine(net, c);
              }),
              HasSubstr("momentum is 0"));
  for (const auto& p : net->parameters()) p.set_requires_grad(false);
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { Engine engine(net, std::vector<ParameterGroup>{}, config(0)); }),
              HasSubstr("no parameter group"));
  for (const auto& p : net->parameters()) p.set_requires_grad(true);
  nn::Dropout empty;
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(empty, AdamW{}, config(0)); }),
              HasSubstr("no parameters"));
  Engine engine(net, AdamW{}, config(0));
  EXPECT_THAT(message_of<ConfigError>([&] { engine.lr(7); }),
              HasSubstr("no parameter group 7; there are 1"));
  EXPECT_THAT(message_of<Error>([&] { engine.backward(torch::zeros({2})); }),
              HasSubstr("one element"));
  EXPECT_THAT(message_of<Error>([&] { engine.backward(torch::zeros({})); }),
              HasSubstr("no parameter"));
}

TEST(EngineStart, TwoEnginesLiveInOneProcessAndGroup) {
  run_as_threads(2, [&](auto group) {
    auto one = std::make_shared<Net>();
    auto two = std::make_shared<Net>();
    Engine first(one, AdamW{.lr = 1e-2}, config(3), group);
    Engine second(two, AdamW{.lr = 1e-2}, config(2), group);
    for (int64_t i = 0; i < 3; ++i) {
      train(first, *one, 1, i);
      train(second, *two, 1, i);
    }
    expect_equal(weights(first), weights(second));
  });
}

TEST(EngineDivergence, AParameterUsedByOneRankAloneDoesNotHangOneSidedGathers) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3), group);
    if (group->rank() == 0) {
      const torch::NoGradGuard guard;
      EXPECT_GT(net->b->weight.abs().sum().template item<float>(), 0);
    }
    train(engine, *net, 1);
    EXPECT_EQ(engine.steps(), 1);
  });
}

TEST(EngineDivergence, AParameterUsedByOneRankAloneIsAnErrorWhereGathersAreMatched) {
  std::atomic<int> errors{0};
  try {
    run_as_threads(2,
                   [&](auto group) {
                     auto net = std::make_shared<Net>();
                     auto c = config(3);
                     c.one_sided_gather = false;
                     Engine engine(net, AdamW{}, c, group);
                     try {
                       if (group->rank() == 0) {
                         const torch::NoGradGuard guard;
                         net->b->weight.sum();
                       }
                       train(engine, *net, 1);
                     } catch (const CommError& error) {
                       ++errors;
                       EXPECT_THAT(error.what(), HasSubstr("all_gather")) << error.what();
                       EXPECT_THAT(error.what(), HasSubstr("b.weight")) << error.what();
                       throw;
                     }
                   },
                   {.timeout = std::chrono::seconds(10)});
    FAIL() << "nothing was thrown";
  } catch (const CommError&) {
  }
  EXPECT_EQ(errors, 2);
}

// A call that fails in a backward pass gives its memory back once, and the engine keeps the arrays
// that it owns.
TEST(EngineFailure, OfAnotherRankIsNamedInBackwardAndReleasesEachArrayOnce) {
  for (const int stage : {0, 1, 2, 3}) {
    std::latch forward_done(4);
    comm::run_as_hosts(2, 2, [&](auto group) {
      SCOPED_TRACE(testing::Message() << "stage " << stage << ", rank " << group->rank());
      auto net = std::make_shared<Net>();
      auto engine = std::make_unique<Engine>(net, AdamW{}, config(stage), group);
      train(*engine, *net, 2);  // from the second step on stages 0 and 1 reduce during a pass
      const auto bytes = [&](std::initializer_list<Category> categories) {
        std::vector<int64_t> all;
        for (const auto category : categories)
          all.push_back(group->ledger()->usage(category).current);
        return all;
      };
      const auto owned = [&] {
        return bytes({Category::parameters, Category::optimizer,
                      // From stage 2 on a pass takes the memory of gradients, and gives it back.
                      stage < 2 ? Category::gradients : Category::optimizer});
      };
      const auto before = owned();
      auto loss = loss_of(*net, group->rank(), 2);
      forward_done.arrive_and_wait();
      if (group->rank() == 1) {
        group->abandon("it has no data");
      } else {
        EXPECT_THROW(group->barrier(), CommError);  // so that the pass's first call throws
        const auto message = message_of<CommError>([&] { engine->backward(loss); });
        // Between hosts that are threads nobody watches the ranks, and only rank 1's host names it.
        EXPECT_THAT(message,
                    HasSubstr(group->rank() == 0 ? "Rank 1 failed: it has no data"
                                                 : "The rail between threads was aborted"));
        EXPECT_EQ(owned(), before);
      }
      loss.reset();
      engine.reset();
      EXPECT_THAT(bytes({Category::gradients, Category::optimizer, Category::gathered_units,
                         Category::gradient_buckets}),
                  testing::Each(0));
    });
  }
}

TEST(EngineBudget, RefusesStatesThatExceedItWithWhatOtherStagesTake) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(1);
    c.memory_budget = 5000;
    try {
      Engine engine(net, AdamW{}, c, group);
      ADD_FAILURE() << "a budget of 5000 bytes was accepted";
    } catch (const OutOfMemory& error) {
      EXPECT_THAT(error.what(), HasSubstr("4.88 KiB"));
      EXPECT_THAT(error.what(), HasSubstr("at stage 3"));
    }
    EXPECT_EQ(group->ledger()->usage(Category::parameters).current, 0);
  });
}

TEST(EngineBudget, LeavesToGatheredUnitsWhatTheFirstStepLeft) {
  std::vector<at::Tensor> results;
  int64_t least = 0;  // that the first step takes with as few gathered units as can be
  for (const int64_t beyond : {int64_t{-1}, int64_t{20'000}, int64_t{1} << 20}) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = config(3);
      c.one_sided_gather = false;
      c.max_live_parameters = beyond < 0 ? 0 : 1 << 20;
      c.memory_budget = beyond < 0 ? int64_t{1} << 40 : least + beyond;
      Engine engine(net, AdamW{.lr = 1e-2}, c, group);
      train(engine, *net, 1);
      const int64_t first = group->ledger()->total().peak;
      const int64_t budget = engine.pager()->budget();
      EXPECT_LE(budget, std::max<int64_t>(0, c.memory_budget - least) + first);
      EXPECT_TRUE(beyond < 1 << 20 || budget > 0);
      train(engine, *net, 4, 1);
      EXPECT_LE(group->ledger()->total().peak, c.memory_budget);
      const auto gathers = engine.pager()->counts().gathers;
      train(engine, *net, 1, 5);
      const auto in_a_step = engine.pager()->counts().gathers - gathers;
      // With room for the model, each unit is gathered once a step.
      EXPECT_TRUE(beyond < 1 << 20 || in_a_step == engine.layout().unit_count());
      std::vector<at::Tensor> flat;
      for (const auto& tensor : weights(engine)) flat.push_back(tensor.flatten());
      if (group->rank() > 0) return;
      if (beyond < 0) least = first;
      results.push_back(torch::cat(flat));
    });
  }
  ASSERT_EQ(results.size(), 3U);
  for (const auto& result : results) EXPECT_TRUE(at::equal(result, results.front()));
}

TEST(EngineBudget, AFirstStepThatExceedsItIsAnErrorOnAllRanks) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(2);
    c.memory_budget = 60'000;  // the states fit, the staging buffers do not
    Engine engine(net, AdamW{}, c, group);
    try {
      train(engine, *net, 1);
      ADD_FAILURE() << "the first step fitted";
    } catch (const OutOfMemory& error) {
      EXPECT_THAT(error.what(), HasSubstr("58.6 KiB"));
    }
  });
}

TEST(EngineModes, EvaluationBetweenStepsChangesNothing) {
  run_as_threads(2, [&](auto group) {
    auto plain = std::make_shared<Net>();
    auto watched = std::make_shared<Net>();
    auto c = config(3);
    c.max_live_parameters = 500;
    Engine first(plain, AdamW{.lr = 1e-2}, c, group);
    Engine second(watched, AdamW{.lr = 1e-2}, c, group);
    for (int64_t i = 0; i < 3; ++i) {
      train(first, *plain, 1, i);
      train(second, *watched, 1, i);
      watched->eval();
      {
        const torch::NoGradGuard guard;
        loss_of(*watched, 0, 100);
      }
      {
        const c10::InferenceMode guard;
        loss_of(*watched, 0, 100);
      }
      watched->train();
    }
    expect_equal(weights(first), weights(second));
  });
}

TEST(GroupNorms, AreOfAWholeStep) {
  for (int stage = 0; stage <= 3; ++stage) {
    comm::run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = config(stage, false, 2);
      Engine engine(net, AdamW{.lr = 1e-3}, c, group);
      EXPECT_THROW(engine.group_norms(), Error);
      engine.backward(loss_of(*net, group->rank(), 0));
      EXPECT_THROW(engine.group_norms(), Error);
      engine.step();
      EXPECT_THROW(engine.group_norms(), Error);
      engine.backward(loss_of(*net, group->rank(), 1));
      const auto norms = engine.group_norms();
      const auto whole = engine.step().grad_norm;
      EXPECT_NEAR(norms.at(0), whole, 1e-6 * whole);
      EXPECT_THROW(engine.group_norms(), Error);
    });
  }
}

TEST(GroupNorms, AreTheSameBitsAtEveryStageAndAddUpToTheWhole) {
  for (const bool bf16 : {false, true}) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      std::vector<double> expected;
      for (int stage = 0; stage <= 3; ++stage) {
        SCOPED_TRACE(testing::Message() << "ranks " << ranks << ", stage " << stage);
        comm::run_as_threads(ranks, [&](auto group) {
          auto net = std::make_shared<Net>();
          const auto is_bias = [](std::string_view name, const at::Tensor&) {
            return name.ends_with("bias");
          };
          Engine engine(net,
                        std::vector<ParameterGroup>{{{}, AdamW{.lr = 1e-3}, is_bias},
                                                    {.optimizer = AdamW{.lr = 1e-2}, .rest = true}},
                        config(stage, bf16), group);
          train(engine, *net, 2);
          engine.backward(loss_of(*net, group->rank(), 5));
          const auto norms = engine.group_norms();
          ASSERT_EQ(norms.size(), 2u);
          double of_biases = 0;
          for (const auto& name : engine.parameter_names()) {
            if (name.ends_with("bias"))
              of_biases += engine.gradient(name).to(at::kDouble).square().sum().item<double>();
          }
          EXPECT_NEAR(norms[0], std::sqrt(of_biases), 1e-6 * norms[0]);
          const auto whole = engine.step().grad_norm;
          EXPECT_NEAR(std::hypot(norms[0], norms[1]), whole, 1e-6 * whole);
          if (group->rank() != 0) return;
          if (stage == 0) expected = norms;
          EXPECT_EQ(norms, expected);
        });
      }
    }
  }
}

}  // namespace
}  // namespace zero
