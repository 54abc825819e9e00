// Optimizer states in 8 bits, and in bf16 beside fp32 weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

using comm::run_as_threads;
using optim::StateFormat;
using testing::AllOf;
using testing::HasSubstr;

Config with_states(Config c, StateFormat format) {
  c.optimizer_states = format;
  return c;
}

// fp32 parameters, whole master weights, halves of them, and none.
std::vector<Config> weights_of_all_kinds(int stage, StateFormat format) {
  std::vector<Config> all(5, with_states(config(stage, true), format));
  all[0].bf16 = false;
  all[2].split_master_weights = true;
  all[3].bf16_master_weights_and_grads = true;
  all[4].bf16 = false;
  all[4].fp16 = true;
  all[4].loss_scaling = {.initial_power = 10, .window = 4, .hysteresis = 1};
  return all;
}

TEST(EightBitStates, AreBitIdenticalOverStagesTiersAndTimings) {
  const TemporaryFolder folder;
  for (const auto format : {StateFormat::bf16, StateFormat::eight_bit}) {
    for (size_t kind = 0; kind < 5; ++kind) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        if (kind > 1 && ranks != 2) continue;
        const auto of = [&](const Config& c) {
          return states_after_training<Net>(c, AdamW{.lr = 1e-2}, ranks, folder.path() / "save");
        };
        const auto expected = of(weights_of_all_kinds(0, format)[kind]);
        for (int stage = 1; stage <= 3; ++stage) {
          SCOPED_TRACE(testing::Message()
                       << "kind " << kind << ", ranks " << ranks << ", stage " << stage);
          const auto c = weights_of_all_kinds(stage, format)[kind];
          expect_equal(of(c), expected);
          if (!c.split_master_weights) expect_equal(of(optimizer_on_host(c)), expected);
          expect_equal(of(on_disk(c, folder)), expected);
          if (stage == 3) {
            expect_equal(of(all_on_host(c)), expected);
            expect_equal(of(all_on_disk(c, folder)), expected);
          }
          if (stage < 2) continue;
          if (!c.fp16) expect_equal(of(in_backward(c)), expected);
          expect_equal(of(in_backward(stage == 3 ? all_on_disk(c, folder) : on_disk(c, folder))),
                       expected);
        }
      }
    }
  }
}

TEST(EightBitStates, OfEveryOptimizerAreBitIdenticalOnDiskAndOnThreads) {
  const TemporaryFolder folder;
  const int threads = at::get_num_threads();
  for (const Optimizer& optimizer :
       {Optimizer(Sgd{.lr = 1e-2, .momentum = 0.9}), Optimizer(Adagrad{}), Optimizer(Lion{}),
        Optimizer(Sgd{.lr = 1e-2})}) {
    const auto of = [&](const Config& c) {
      return states_after_training<Net>(c, optimizer, 2, folder.path() / "save");
    };
    const auto c = with_states(config(3, true), StateFormat::eight_bit);
    at::set_num_threads(1);
    const auto expected = of(c);
    at::set_num_threads(4);
    expect_equal(of(c), expected);
    expect_equal(of(all_on_disk(c, folder)), expected);
    at::set_num_threads(threads);
  }
}

// Blocks on disk of several parts and of parts that are no whole pages.
TEST(EightBitStates, OfALargeUnitAreThoseInMemory) {
  struct Line : nn::Module {
    explicit Line(int64_t numel)
        : weight(register_parameter("weight", torch::sin(torch::arange(numel) * 0.1))) {}
    at::Tensor weight;
  };
  const TemporaryFolder folder;
  for (const int64_t numel : {65'536, 150'001, 1'100'000}) {
    const auto of = [&](const Config& c) {
      return of_rank_zero(2, [&](auto group) {
        auto net = std::make_shared<Line>(numel);
        Engine engine(net, AdamW{.lr = 1e-2}, c, group);
        for (int step = 0; step < 3; ++step) {
          engine.backward((net->weight.to(at::kFloat) - 0.1 * step).pow(2).sum());
          engine.step();
        }
        return std::vector{engine.parameter("weight").clone(),
                           engine.optimizer_state("weight", "exp_avg").clone(),
                           engine.optimizer_state("weight", "exp_avg_sq").clone()};
      });
    };
    auto c = with_states(config(2, true), StateFormat::eight_bit);
    c.unit_bytes = 16 << 20;
    expect_equal(of(on_disk(c, folder)), of(c));
    c.stage = 3;
    expect_equal(of(all_on_disk(c, folder)), of(c));
  }
}

TEST(EightBitStates, TakeTheBytesOfTheFormula) {
  const TemporaryFolder folder;
  for (int stage = 0; stage <= 3; ++stage) {
    const int64_t slices = stage >= 1 ? 2 : 1;
    run_as_threads(2, [&](auto group) {
      const std::vector<int64_t> master{0, 4 * 64, 2 * 64, 0, 4 * 64};
      for (size_t kind = 0; kind < master.size(); ++kind) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{}, weights_of_all_kinds(stage, StateFormat::eight_bit)[kind],
                      group);
        train(engine, *net, 2);
        const auto formula = engine.memory_formula();
        int64_t elements = 0;
        for (const auto& unit : engine.layout().units()) elements += unit.numel;
        // Two moments of 68 bytes for each 64 elements.
        EXPECT_EQ(formula.optimizer, elements / 64 / slices * (master[kind] + 2 * 68));
        EXPECT_EQ(group->ledger()->usage(Category::optimizer).current, formula.optimizer);
        EXPECT_EQ(formula.total(), formula.parameters + formula.gradients + formula.optimizer);
      }
    });
    run_as_threads(2, [&](auto group) {
      const auto c = with_states(config(stage, true), StateFormat::eight_bit);
      auto net = std::make_shared<Net>();
      auto disk = on_disk(c, folder);
      disk.offload_optimizer.pipeline_read = false;
      Engine engine(net, AdamW{}, disk, group);
      train(engine, *net, 2);
      // Arrays on disk are whole pages.
      int64_t expected = 0;
      for (const auto& unit : engine.layout().units()) {
        const int64_t numel = unit.numel / slices;
        for (const int64_t bytes : {numel * 4, numel / 64 * 68, numel / 64 * 68})
          expected += (bytes + 4095) / 4096 * 4096;
      }
      EXPECT_EQ(engine.disk().bytes, expected);
      const auto before = engine.disk();
      train(engine, *net, 1, 2);
      const auto step = engine.traffic_formula();
      EXPECT_EQ(engine.disk().read - before.read, step.disk_read);
      EXPECT_EQ(engine.disk().written - before.written, step.disk_written);
    });
  }
}

TEST(EightBitStates, SavesLoadInEveryFormat) {
  const TemporaryFolder folder;
  const auto file = (folder.path() / "full").string();
  run_as_threads(2, [&](auto group) {
    const auto engine_of = [&](StateFormat format) {
      return std::make_unique<Engine>(std::make_shared<Net>(), AdamW{.lr = 1e-2},
                                      with_states(config(2), format), group);
    };
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, with_states(config(2), StateFormat::eight_bit), group);
    train(engine, *net, 5);
    engine.save_full(file);
    engine.save((folder.path() / "sharded").string());
    const auto expected = engine.optimizer_state("b.weight", "exp_avg").clone();
    EXPECT_GT(expected.abs().sum().template item<float>(), 0);
    // Every code is a number of fp32, and comes back.
    for (const auto format : {StateFormat::fp32, StateFormat::bf16, StateFormat::eight_bit}) {
      auto other = engine_of(format);
      other->load_full(file);
      EXPECT_TRUE(torch::equal(other->optimizer_state("b.weight", "exp_avg"), expected));
      // A sharded one has the codes themselves.
      other->load((folder.path() / "sharded").string());
      EXPECT_TRUE(torch::equal(other->optimizer_state("b.weight", "exp_avg"), expected));
    }
  });
}

// The measure is fp32 moments: losses are the same except for a small part of what was learnt.
TEST(EightBitStates, LearnAsMomentsInFp32Do) {
  for (const Optimizer& optimizer :
       {Optimizer(AdamW{.lr = 3e-3}), Optimizer(Sgd{.lr = 2e-3, .momentum = 0.9}),
        Optimizer(Adagrad{.lr = 0.03}), Optimizer(Lion{.lr = 1e-3})}) {
    const auto losses = [&](StateFormat format) {
      auto net = std::make_shared<Net>();
      Engine engine(net, optimizer, with_states(config(0), format));
      std::vector<double> all;
      for (int64_t step = 0; step < 200; ++step) {
        const auto inputs = torch::cos(torch::arange(350) * 0.9 + step % 7).view({50, 7});
        const auto targets = torch::tanh(inputs.narrow(1, 0, 1) - inputs.narrow(1, 3, 1));
        const auto loss = (net->forward(inputs) - targets).pow(2).mean();
        all.push_back(loss.item<double>());
        engine.backward(loss);
        engine.step();
      }
      return all;
    };
    const auto exact = losses(StateFormat::fp32);
    const auto coded = losses(StateFormat::eight_bit);
    const double learnt = exact.front() - exact.back();
    EXPECT_GT(learnt, 0.1 * exact.front());
    for (size_t i = 0; i < exact.size(); ++i)
      EXPECT_NEAR(coded[i], exact[i], 0.05 * exact.front()) << optim::name(optimizer) << " " << i;
    EXPECT_NEAR(coded.back(), exact.back(), 0.05 * learnt) << optim::name(optimizer);
  }
}

TEST(EightBitStates, AreRefusedOfUpdatesInTwoPasses) {
  for (const Optimizer& optimizer : {Optimizer(Lamb{}), Optimizer(Muon{})}) {
    EXPECT_THAT(message_of<ConfigError>([&] {
                  Engine engine(std::make_shared<Net>(), optimizer,
                                with_states(config(0), StateFormat::eight_bit));
                }),
                AllOf(HasSubstr("data_types.optimizer_state_dtype"), HasSubstr("two sweeps")));
  }
}

}  // namespace
}  // namespace zero
