// Every optimizer in the engine: results do not depend on stages, slices, tiers, schedules or
// threads; memory and what the ranks exchange between two passes are the formulas; states save and
// load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/optim/exact_sum.h"
#include "zero/optim/passes.h"

namespace zero {
namespace {

using comm::Collective;
using comm::run_as_threads;

const std::vector<std::pair<std::string, Optimizer>>& optimizers() {
  static const std::vector<std::pair<std::string, Optimizer>> all{
      {"Adagrad", Adagrad{.lr = 1e-2, .weight_decay = 0.1}},
      {"Lion", Lion{.lr = 1e-3, .weight_decay = 0.1}},
      {"Lamb", Lamb{.lr = 1e-2, .weight_decay = 0.1}},
      {"Muon", Muon{.lr = 1e-2, .weight_decay = 0.1}}};
  return all;
}

// Those of a parameter of Net: of Muon's groups biases have AdamW's.
std::vector<std::string_view> states_of(const Optimizer& optimizer, const std::string& name) {
  const auto* muon = std::get_if<Muon>(&optimizer);
  if (muon == nullptr || name.ends_with("weight")) return optim::state_names(optimizer);
  return optim::state_names(optim::beside_matrices(*muon));
}

std::vector<at::Tensor> look(Engine& engine, const Optimizer& optimizer) {
  std::vector<at::Tensor> now;
  for (const auto& name : engine.parameter_names()) {
    now.push_back(engine.parameter(name).clone());
    for (const auto state : states_of(optimizer, name))
      now.push_back(engine.optimizer_state(name, state).clone());
  }
  return now;
}

std::vector<at::Tensor> after_training(const Config& c, const Optimizer& optimizer, int ranks,
                                       int64_t steps = 4) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, steps);
    engine.complete_update();
    return look(engine, optimizer);
  });
}

TEST(Optimizers, StagesSlicesTiersAndSchedulesGiveTheSameBits) {
  const TemporaryFolder folder;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const auto& replicated : {config(0, false), config(0, true), [] {
                                     auto split = config(0, true);
                                     split.split_master_weights = true;
                                     return split;
                                   }()}) {
      for (int ranks = 1; ranks <= 3; ++ranks) {
        SCOPED_TRACE(testing::Message() << name << " bf16 " << replicated.bf16 << " split "
                                        << replicated.split_master_weights << " ranks " << ranks);
        const auto expected = after_training(replicated, optimizer, ranks);
        const auto same = [&](const char* what, const Config& c) {
          SCOPED_TRACE(what);
          expect_equal(after_training(c, optimizer, ranks), expected);
        };
        auto c = replicated;
        for (c.stage = 1; c.stage <= 3; ++c.stage) {
          SCOPED_TRACE(testing::Message() << "stage " << c.stage);
          same("in memory", c);
          same("on disk", on_disk(c, folder));
          if (!c.split_master_weights) same("on the host", optimizer_on_host(c));
          if (c.stage < 2) continue;
          same("in backward", in_backward(c));
          if (!c.split_master_weights)
            same("on the host, in backward", in_backward(optimizer_on_host(c)));
          same("on disk, in backward", in_backward(on_disk(c, folder)));
          auto gradients = on_disk(c, folder);
          gradients.offload_optimizer.gradients = true;
          same("gradients on disk", gradients);
        }
        c.stage = 3;
        same("all on disk", all_on_disk(c, folder));
        same("all on disk, in backward", in_backward(all_on_disk(c, folder)));
        same("all on the host", all_on_host(c));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Optimizers, ADelayedUpdateGivesTheSameBitsWhereverStatesAre) {
  const TemporaryFolder folder;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << name << " bf16 " << bf16);
      auto c = config(0, bf16);
      c.offload_optimizer.device = OffloadDevice::cpu;
      c.offload_optimizer.delayed_update_after = 2;
      const auto expected = after_training(c, optimizer, 2, 6);
      for (c.stage = 1; c.stage <= 3; ++c.stage) {
        expect_equal(after_training(c, optimizer, 2, 6), expected);
        expect_equal(after_training(on_disk(c, folder), optimizer, 2, 6), expected);
      }
      c.stage = 3;
      expect_equal(after_training(all_on_disk(c, folder), optimizer, 2, 6), expected);
    }
  }
}

// Of the update: LibTorch's matrix products depend on them.
TEST(Optimizers, ThreadsDoNotMatter) {
  const int threads = at::get_num_threads();
  for (const auto& [name, optimizer] : optimizers()) {
    SCOPED_TRACE(name);
    std::vector<at::Tensor> of_one;
    for (const int count : {1, 2, 3}) {
      auto net = std::make_shared<Net>();
      Engine engine(net, optimizer, config(0));
      for (int64_t i = 0; i < 3; ++i) {
        at::set_num_threads(1);
        engine.backward(loss_of(*net, 0, i));
        at::set_num_threads(count);
        engine.step();
      }
      if (count == 1) of_one = look(engine, optimizer);
      expect_equal(look(engine, optimizer), of_one);
    }
  }
  at::set_num_threads(threads);
}

TEST(Optimizers, StatesTakeTheBytesOfTheFormula) {
  const std::vector<std::pair<Optimizer, int64_t>> bytes{{Adagrad{}, 4}, {Lion{}, 4},  {Lamb{}, 8},
                                                         {Muon{}, 4},    {AdamW{}, 8}, {Sgd{}, 0}};
  for (const auto& [optimizer, moments] : bytes) {
    for (const bool bf16 : {false, true}) {
      for (const int stage : {0, 1, 3}) {
        run_as_threads(2, [&, &optimizer = optimizer, moments = moments](auto group) {
          Config c;
          c.stage = stage;
          c.bf16 = bf16;
          Engine engine(std::make_shared<Chain>(), optimizer, c, group);
          const int64_t expected = (moments + (bf16 ? 4 : 0)) * 4 * 64 * 64 / (stage == 0 ? 1 : 2);
          EXPECT_EQ(engine.memory_formula().optimizer, expected);
          EXPECT_EQ(group->ledger()->usage(Category::optimizer).current, expected);
        });
      }
    }
  }
}

// What the ranks send in a step beyond AdamW's.
int64_t gathered_in_a_step(const Config& c, const Optimizer& optimizer, int ranks,
                           const std::function<void(Engine&)>& look = {}) {
  int64_t sent = 0;
  run_as_threads(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, 1);
    group->traffic().reset();
    train(engine, *net, 1, 1);
    const auto counted = group->traffic().count(Collective::all_gather).logical_bytes;
    EXPECT_EQ(engine.traffic_formula().all_gather, counted);
    if (group->rank() != 0) return;
    sent = counted;
    if (look) look(engine);
  });
  return sent;
}

TEST(Lamb, ExchangesTheNormsOfParametersInSeveralSlicesAndNothingElse) {
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, stage " << stage);
      int64_t shared = 0;
      const auto with = gathered_in_a_step(config(stage), Lamb{}, ranks, [&](Engine& engine) {
        const auto& layout = engine.layout();
        for (int64_t u = 0; u < layout.unit_count(); ++u) {
          for (const auto& segment : layout.unit(u).segments) {
            const int64_t slice = layout.unit(u).numel / ranks;
            if (segment.offset / slice != (segment.offset + segment.numel - 1) / slice) ++shared;
          }
        }
      });
      const auto without = gathered_in_a_step(config(stage), AdamW{}, ranks);
      const bool sliced = ranks > 1 && stage > 0;
      EXPECT_EQ(shared > 0, ranks > 1);
      EXPECT_EQ(with - without, sliced ? shared * 2 * 21 * 8 * (ranks - 1) : 0);
    }
  }
}

TEST(Muon, ExchangesDirectionsOnceAndOrthogonalOnesOnce) {
  run_as_threads(2, [&](auto group) {
    for (const int stage : {0, 1, 2}) {
      auto chain = std::make_shared<Chain>();
      Config c = config(stage);
      c.unit_bytes = 64 * 64 * 4;  // a unit for each matrix: two batches of two
      Engine engine(chain, Muon{}, c, group);
      const auto step = [&] {
        engine.backward(chain->forward(torch::full({3, 64}, 0.1)).mean());
        engine.step();
      };
      step();
      group->traffic().reset();
      step();
      const auto counted = group->traffic().count(Collective::all_gather).logical_bytes;
      EXPECT_EQ(engine.traffic_formula().all_gather, counted);
      const int64_t model = int64_t{4} * 64 * 64 * 4;
      // Parameters; directions, and the results.
      EXPECT_EQ(counted, stage == 0 ? 0 : 3 * model / 2);
    }
  });
}

TEST(Lamb, TheSecondPassMovesWhatTheFormulaSays) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    for (const bool host : {false, true}) {
      for (const int read_ahead : {0, 1}) {
        SCOPED_TRACE(testing::Message() << "bf16 " << bf16 << " host " << host);
        run_as_threads(2, [&](auto group) {
          auto c = host ? optimizer_on_host(config(2, bf16)) : on_disk(config(2, bf16), folder);
          c.offload_optimizer.pipeline_read = read_ahead != 0;
          auto net = std::make_shared<Net>();
          Engine engine(net, Lamb{}, c, group);
          train(engine, *net, 2);
          const auto disk = engine.disk();
          const auto traffic = engine.host_traffic();
          train(engine, *net, 1, 2);
          const auto formula = engine.traffic_formula();
          if (host) {
            EXPECT_EQ(engine.host_traffic().down - traffic.down, formula.host_down);
            EXPECT_EQ(engine.host_traffic().up - traffic.up, formula.host_up);
          } else {
            // What is read ahead for the next step may be in either.
            if (read_ahead == 0) {
              EXPECT_EQ(engine.disk().read - disk.read, formula.disk_read);
            }
            EXPECT_EQ(engine.disk().written - disk.written, formula.disk_written);
          }
        });
      }
    }
  }
}

TEST(Optimizers, StatesSaveAndLoadAlsoAtAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << name << " bf16 " << bf16);
      const auto file = (folder.path() / "full").string();
      const auto saved = of_rank_zero(3, [&, &optimizer = optimizer](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, optimizer, config(2, bf16), group);
        train(engine, *net, 3);
        engine.save((folder.path() / "sharded").string());
        engine.save_full(file);
        auto then = look(engine, optimizer);
        train(engine, *net, 2, 3);
        const auto straight = look(engine, optimizer);
        engine.load((folder.path() / "sharded").string());
        train(engine, *net, 2, 3);
        expect_equal(look(engine, optimizer), straight);
        engine.load_full(file);
        train(engine, *net, 2, 3);
        expect_equal(look(engine, optimizer), straight);
        return then;
      });
      std::vector<at::Tensor> resumed;
      for (const int ranks : {1, 2}) {
        for (const int stage : {0, 3}) {
          std::vector<at::Tensor> after;
          const auto loaded = of_rank_zero(ranks, [&, &optimizer = optimizer](auto group) {
            auto net = std::make_shared<Net>();
            Engine engine(net, optimizer, config(stage, bf16), group);
            engine.load_full(file);
            EXPECT_EQ(engine.steps(), 3);
            auto now = look(engine, optimizer);
            train(engine, *net, 2, 3);
            auto later = look(engine, optimizer);
            if (group->rank() == 0) after = std::move(later);
            return now;
          });
          expect_equal(loaded, saved);
          if (stage == 0) {
            resumed = after;
          } else {
            expect_equal(after, resumed);
          }
        }
      }
    }
  }
}

// By value, with clipping by norm before it: what torch's two functions do, one after the other.
TEST(Clipping, ByValueFollowsThatByNormAndWorksInBackward) {
  const double limit = 0.003;
  auto c = config(0);
  c.gradient_clipping = 0.5;
  c.gradient_clipping_value = limit;
  auto net = std::make_shared<Net>();
  Engine engine(net, Sgd{.lr = 1}, c);
  auto plain = std::make_shared<Net>();
  engine.backward(loss_of(*net, 0, 0));
  engine.step();
  loss_of(*plain, 0, 0).backward();
  torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
  torch::nn::utils::clip_grad_value_(plain->parameters(), limit);
  bool cut = false;
  for (const auto& p : plain->named_parameters()) {
    const auto expected = p.value().detach() - p.value().grad();
    cut = cut || p.value().grad().abs().max().item<double>() > 0.999 * limit;
    EXPECT_TRUE(torch::allclose(engine.parameter(p.key()), expected, 1e-5, 1e-7)) << p.key();
  }
  EXPECT_TRUE(cut);
  c = config(2);
  c.gradient_clipping_value = limit;
  const auto expected = after_training(c, AdamW{}, 2);
  expect_equal(after_training(in_backward(c), AdamW{}, 2), expected);
  const auto sgd = [&](const Config& with) { return after_training(with, Sgd{.lr = 1}, 2); };
  EXPECT_FALSE(torch::equal(sgd(c).front(), sgd(config(2)).front()));
}

// Biases go to AdamW, whose rate follows its own.
TEST(Muon, TrainsMatricesAndLeavesTheRestToAdamW) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Muon{.lr = 0.02, .adam_lr = 1e-3}, config(0));
  EXPECT_EQ(engine.group_count(), 2);
  EXPECT_EQ(engine.lr(0), 0.02);
  EXPECT_EQ(engine.lr(1), 1e-3);
  auto same = std::make_shared<Net>();
  Engine adam(same, AdamW{.lr = 1e-3, .weight_decay = 0}, config(0));
  const auto before = engine.parameter("b.weight").clone();
  train(engine, *net, 1);
  train(adam, *same, 1);
  EXPECT_TRUE(torch::equal(engine.parameter("b.bias"), adam.parameter("b.bias")));
  const auto step = engine.parameter("b.weight") - before;
  const auto singular = std::get<1>(torch::linalg_svd(step / -0.02, false, {}));
  EXPECT_LT(singular.max().item<double>(), 1.3);
  EXPECT_THROW(engine.optimizer_state("b.weight", "exp_avg"), ConfigError);
  EXPECT_NO_THROW(engine.optimizer_state("b.bias", "exp_avg"));
}

TEST(Lamb, StepsByTheNormOfTheParameter) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Lamb{.lr = 0.01, .bias_correction = false}, config(0));
  const auto before = engine.parameter("b.weight").clone();
  train(engine, *net, 1);
  const auto step = engine.parameter("b.weight") - before;
  EXPECT_NEAR(step.norm().item<double>(), 0.01 * before.norm().item<double>(), 1e-6);
}

}  // namespace
}  // namespace zero
