// States in the host tier, and the cap on the device's memory: the same bits as on the device,
// bytes moved, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <utility>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/tiers.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::HasSubstr;

TEST(HostTier, AnOptimizerOnTheHostGivesTheSameBits) {
  const TemporaryFolder folder;
  const std::vector<Optimizer> optimizers{AdamW{.lr = 1e-2}, Sgd{.lr = 1e-2, .momentum = 0.9},
                                          Sgd{.lr = 1e-2}};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (int ranks = 1; ranks <= 3; ++ranks) {
        SCOPED_TRACE(testing::Message()
                     << "stage " << stage << " ranks " << ranks << " bf16 " << bf16);
        for (const auto& optimizer : optimizers) {
          const auto c = config(stage, bf16);
          const auto expected = states_after_training<Net>(c, optimizer, ranks, folder.path());
          for (const double ratio : {1.0, 0.4}) {
            auto host = optimizer_on_host(c);
            host.offload_optimizer.ratio = ratio;
            expect_equal(states_after_training<Net>(host, optimizer, ranks, folder.path()),
                         expected);
          }
        }
      }
    }
  }
}

TEST(HostTier, UpdatesInBackwardGiveTheSameBitsAndMoveTheSameBytes) {
  for (const int stage : {2, 3}) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      for (const bool bf16 : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "stage " << stage << " ranks " << ranks << " bf16 " << bf16);
        const auto run = [&](Config c, bool in_backward) {
          std::vector<at::Tensor> result;
          c.update_in_backward = in_backward;
          run_as_threads(ranks, [&](auto group) {
            auto net = std::make_shared<Net>();
            Engine engine(net, AdamW{.lr = 1e-2}, c, group);
            train(engine, *net, 2);
            const auto before = engine.host_traffic();
            train(engine, *net, 2, 2);
            const auto after = engine.host_traffic();
            const auto formula = engine.traffic_formula();
            EXPECT_EQ(after.down - before.down, 2 * formula.host_down);
            if (c.offload_param.device == OffloadDevice::none) {
              EXPECT_EQ(after.up - before.up, 2 * formula.host_up);
            }
            auto all = weights(engine);
            if (group->rank() == 0) result = all;
          });
          return result;
        };
        const auto c = config(stage, bf16);
        const auto expected = run(c, false);
        expect_equal(run(optimizer_on_host(c), true), expected);
        if (stage == 3) expect_equal(run(all_on_host(c), true), expected);
      }
    }
  }
}

// Bytes between device and host in three steps after the first two.
DeviceTraffic traffic_of_three_steps(Engine& engine, Net& net) {
  train(engine, net, 2);
  const auto before = engine.host_traffic();
  train(engine, net, 3, 2);
  const auto after = engine.host_traffic();
  return {after.down - before.down, after.up - before.up};
}

TEST(HostTier, AnOptimizerOnTheHostMovesGradientsDownAndParametersUpAndNothingElse) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      for (const bool bf16 : {false, true}) {
        for (const int64_t k : {1, 3}) {
          for (const int64_t delay : {0, 1}) {
            SCOPED_TRACE(testing::Message() << "stage " << stage << " ranks " << ranks << " bf16 "
                                            << bf16 << " micro-batches " << k);
            run_as_threads(ranks, [&](auto group) {
              auto net = std::make_shared<Net>();
              auto c = optimizer_on_host(config(stage, bf16, k));
              c.unit_bytes = 1 << 20;  // one unit: no rank has padding alone
              c.offload_optimizer.delayed_update_after = delay;
              Engine engine(net, AdamW{}, c, group);
              const auto moved = traffic_of_three_steps(engine, *net);
              const int64_t bytes = bf16 ? 2 : 4;
              // The elements that this rank updates, once.
              const int64_t owned = engine.layout().numel() / (stage == 0 ? 1 : ranks);
              EXPECT_EQ(moved.up, 3 * owned * bytes);
              // Accumulated on the device: once a step, in fp32 where several are added. Else each
              // micro-batch: as it is where it is this rank's alone, unrounded where it is a sum
              // that is added to others.
              const int64_t stored = k > 1 ? 4 : bytes;
              const int64_t down = stage < 2    ? stored
                                   : ranks == 1 ? k * bytes
                                                : stored + (k - 1) * 4;
              EXPECT_EQ(moved.down, 3 * owned * down);
              const auto formula = engine.traffic_formula();
              EXPECT_EQ(moved.down, 3 * formula.host_down);
              EXPECT_EQ(moved.up, 3 * formula.host_up);
            });
          }
        }
      }
    }
  }
}

TEST(HostTier, ZeroOffloadsFourBytesAParameterAreMetExactly) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = optimizer_on_host(config(2, true));
    Engine engine(net, AdamW{}, c, group);
    const auto moved = traffic_of_three_steps(engine, *net);
    const int64_t each_way = engine.layout().numel() / 2 * 2;  // bf16 elements of this rank
    EXPECT_EQ(moved.down, 3 * each_way);
    EXPECT_LE(moved.up, 3 * each_way);  // padding alone does not come back
    EXPECT_EQ(moved.up, 3 * engine.traffic_formula().host_up);
  });
}

TEST(HostTier, ParametersOnTheHostGoUpForEveryGatherOfThePlan) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 3}) {
        for (const auto device : {OffloadDevice::none, OffloadDevice::cpu}) {
          for (const auto& [live, delay] :
               {std::pair<int64_t, int64_t>{0, 0}, {int64_t{1} << 30, 0}, {int64_t{1} << 30, 1}}) {
            run_as_threads(ranks, [&, live = live, delay = delay](auto group) {
              auto net = std::make_shared<Net>();
              auto c = all_on_host(config(3, bf16, k));
              c.offload_optimizer.device = device;
              c.max_live_parameters = live;
              c.offload_optimizer.delayed_update_after = delay;
              Engine engine(net, AdamW{}, c, group);
              const auto moved = traffic_of_three_steps(engine, *net);
              const int64_t bytes = bf16 ? 2 : 4;
              const auto& layout = engine.layout();
              int64_t up = 0;
              for (const auto& gather : engine.pager()->plan()->gathers)
                up += layout.slice_numel(gather.unit) * bytes;
              const auto formula = engine.traffic_formula();
              int64_t all = 0;
              for (int64_t u = 0; u < layout.unit_count(); ++u)
                all += layout.slice_numel(u) * bytes;
              EXPECT_LE(up, 2 * k * all);
              EXPECT_TRUE(live == 0 || up == all) << "once a step";
              // The formula's gathers are those of the paper: twice a micro-batch.
              EXPECT_EQ(moved.up, 3 * (up + formula.host_up - 2 * k * all));
              EXPECT_EQ(moved.down, 3 * formula.host_down);
              EXPECT_EQ(group->ledger()->usage(Category::parameters).peak, 0);
              // An optimizer on the device fetches fp32 parameters, unless a delayed update starts
              // from those that it made before.
              if (device == OffloadDevice::cpu || bf16 || delay > 0) {
                EXPECT_EQ(formula.host_up, 2 * k * all);
              } else {
                EXPECT_GT(formula.host_up, 2 * k * all);
              }
            });
          }
        }
      }
    }
  }
}

TEST(HostTier, TheLedgerIsTheFormulaOnBothSides) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        for (const bool parameters_too : {false, true}) {
          if (parameters_too && stage < 3) continue;
          run_as_threads(2, [&](auto group) {
            auto net = std::make_shared<Net>();
            auto c = optimizer_on_host(config(stage, bf16, k));
            c.unit_bytes = 1 << 20;
            if (parameters_too) c = all_on_host(c);
            Engine engine(net, AdamW{}, c, group);
            train(engine, *net, 2);
            const auto& ledger = *group->ledger();
            const auto held = [&](Category category) { return ledger.usage(category).current; };
            const auto device = engine.memory_formula();
            const auto host = engine.host_memory_formula();
            EXPECT_EQ(held(Category::parameters), device.parameters);
            EXPECT_EQ(held(Category::gradients), device.gradients);
            EXPECT_EQ(held(Category::optimizer), device.optimizer);
            EXPECT_EQ(held(Category::host_parameters), host.parameters);
            EXPECT_EQ(held(Category::host_gradients), host.gradients);
            EXPECT_EQ(held(Category::host_optimizer), host.optimizer);
            EXPECT_EQ(device.optimizer, 0);
            EXPECT_EQ(device.gradients > 0, stage < 2);
            const int64_t owned = engine.layout().numel() / (stage == 0 ? 1 : 2);
            // Master weights and two moments; fp32 parameters on the host are their own master.
            EXPECT_EQ(host.optimizer, owned * (parameters_too && !bf16 ? 8 : 12));
            EXPECT_EQ(host.gradients, owned * (bf16 && k == 1 ? 2 : 4));
            EXPECT_EQ(host.parameters, parameters_too ? owned * (bf16 ? 2 : 4) : 0);
          });
        }
      }
    }
  }
}

TEST(HostTier, APartOfTheOptimizerStaysOnTheDevice) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = optimizer_on_host(config(1));
    c.offload_optimizer.ratio = 0.5;
    Engine engine(net, AdamW{}, c, group);
    const auto device = engine.memory_formula().optimizer;
    EXPECT_EQ(device, group->ledger()->usage(Category::optimizer).current);
    EXPECT_NEAR(static_cast<double>(device), static_cast<double>(engine.layout().numel()) / 2 * 4,
                1500);
    const auto moved = traffic_of_three_steps(engine, *net);
    const auto formula = engine.traffic_formula();
    EXPECT_EQ(moved.down, 3 * formula.host_down);
    EXPECT_EQ(moved.up, 3 * formula.host_up);
    EXPECT_GT(moved.up, 0);
    EXPECT_LT(moved.up, 3 * engine.layout().numel() / 2 * 4);
  });
}

// --- The cap ---

struct Wide : nn::Module {
  Wide()
      : a(register_module("a", nn::Linear(700, 700))),
        b(register_module("b", nn::Linear(700, 700))),
        c(register_module("c", nn::Linear(700, 1))) {
    const torch::NoGradGuard guard;
    for (auto& p : parameters())
      p.copy_(torch::sin(torch::arange(p.numel()) * 0.7).mul(0.02).view(p.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  nn::Linear a, b, c;
};

void step_on_rows(Engine& engine, Wide& net, int64_t rows) {
  engine.backward(net.forward(torch::ones({rows, 700})).mean());
  engine.step();
}

// Returns the message of a refusal, or nothing if `body` is not refused.
std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  return {};
}

TEST(DeviceMemory, StatesThatExceedItAreRefusedOnEveryRankWithTheNextCheaperChoice) {
  constexpr int64_t kMiB = 1 << 20;
  for (int stage = 0; stage <= 3; ++stage) {
    std::atomic<int> refused = 0;
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Wide>();
      Config c;
      c.stage = stage;
      c.unit_bytes = kMiB / 2;
      c.device_memory = 5 * kMiB;  // 15 MiB of states at stage 0, 7.5 at stage 3
      const auto told = refusal([&] { Engine(net, AdamW{}, c, group); });
      if (!told.empty()) ++refused;
      EXPECT_THAT(told, HasSubstr("The device has 5.00 MiB (device_memory)"));
      EXPECT_THAT(told, HasSubstr("at stage " + std::to_string(stage)));
      EXPECT_THAT(told, HasSubstr("offload_optimizer.device \"cpu\""));
    });
    EXPECT_EQ(refused, 2);
  }
}

TEST(DeviceMemory, WhatIsAdvisedFitsAndTrainsWithTheSameBitsWithinTheCap) {
  install_host_allocator();
  const auto train_at = [&](Config c, int64_t cap) {
    c.device_memory = cap;
    return of_rank_zero(2, [&](auto group) {
      auto net = std::make_shared<Wide>();
      Engine engine(net, AdamW{}, c, group);
      for (int i = 0; i < 4; ++i) step_on_rows(engine, *net, 2);
      if (cap > 0) {
        EXPECT_LE(group->ledger()->device().peak, c.device_memory);
        EXPECT_GT(engine.pager()->budget(), 0) << "what the first step left is for gathered units";
        EXPECT_FALSE(engine.pager()->plan()->gathers.empty());
      }
      auto all = weights(engine);
      return all;
    });
  };
  Config c;
  c.stage = 3;
  c.unit_bytes = 1 << 19;
  const auto expected = train_at(c, 0);
  // No state stays; gradients and gathered units, of 2 MiB each, come and go.
  expect_equal(train_at(all_on_host(c), 32 << 20), expected);
}

TEST(DeviceMemory, AStepThatExceedsItLeavesTheEngineAsItWas) {
  install_host_allocator();
  constexpr int64_t kRows = 8'000;
  int64_t forward = 0;
  auto& allocator = HostAllocator::instance();
  const auto c = config(0);
  {  // The bytes of a pass.
    auto net = std::make_shared<Wide>();
    Engine engine(net, AdamW{}, c);
    allocator.reset_peaks();
    (void)net->forward(torch::ones({kRows, 700})).mean();
    forward = allocator.usage().used.peak;
  }
  std::vector<at::Tensor> expected;
  int64_t states = 0;
  {
    auto net = std::make_shared<Wide>();
    Engine engine(net, AdamW{}, c);
    states = engine.memory_formula().total();
    step_on_rows(engine, *net, 3);
    step_on_rows(engine, *net, 5);
    expected = weights(engine);
    for (auto& weight : expected) weight = weight.clone();
  }
  const auto attempt = [&](int64_t tensors, bool in_forward) {
    auto capped = c;
    capped.device_memory = states + tensors;
    auto net = std::make_shared<Wide>();
    Engine engine(net, AdamW{}, capped);
    step_on_rows(engine, *net, 3);
    at::Tensor loss;
    const auto forward_told = refusal([&] {
      loss = net->forward(torch::ones({kRows, 700})).mean();
    });
    EXPECT_EQ(!forward_told.empty(), in_forward) << forward_told;
    at::Tensor filler;  // leaves backward no room
    if (!in_forward) filler = torch::empty({tensors - allocator.used() - (1 << 20)}, at::kByte);
    const auto told = in_forward ? forward_told : refusal([&] { engine.backward(loss); });
    loss = filler = at::Tensor();
    EXPECT_THAT(told, HasSubstr("The device has no room for"));
    EXPECT_THAT(told, HasSubstr("activations"));
    EXPECT_THAT(told, HasSubstr("optimizer"));
    EXPECT_THAT(told, HasSubstr("smaller micro-batch"));
    step_on_rows(engine, *net, 5);
    const auto now = weights(engine);
    expect_equal(now, expected);
  };
  attempt(forward / 2, true);
  attempt(2 * forward, false);
}

TEST(DeviceMemory, BucketsCountAndARefusalInBackwardLeavesTheGroupWhole) {
  std::atomic<int> refused = 0;
  std::array<int64_t, 2> held{};  // by rank
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Wide>();
    Config c;
    c.stage = 2;
    c.unit_bytes = 8 << 20;
    c.device_memory = int64_t{1} << 40;
    {
      const Engine roomy(net, AdamW{}, c, group);
      group->barrier("all have their engines");
      held[static_cast<size_t>(group->rank())] =
          group->ledger()->device().current + HostAllocator::instance().used();
      group->barrier("all have measured");
    }
    net = std::make_shared<Wide>();
    group->barrier("the first engine is gone");
    c.device_memory = std::max(held[0], held[1]) + (1 << 20);  // a bucket is 3.8 MiB
    Engine engine(net, AdamW{}, c, group);
    group->barrier("all have their engines");
    const auto told = refusal([&] { step_on_rows(engine, *net, 2); });
    EXPECT_THAT(told, HasSubstr("of gradient_buckets"));
    EXPECT_THAT(told, HasSubstr("The next cheaper choice: offload_optimizer.device \"cpu\""));
    if (!told.empty()) ++refused;
    group->barrier("all were refused");
    const HostScope scope;
    expect_equal(weights(engine), Wide().parameters());
  });
  EXPECT_EQ(refused, 2);
}

// Its last layer, which has a gradient first of all, is not used: so all units are reduced at the
// end of a pass.
struct WideWithALayerToSpare : Wide {
  WideWithALayerToSpare() : spare(register_module("spare", nn::Linear(700, 7000))) {
    const torch::NoGradGuard guard;
    for (auto& p : spare->parameters()) p.fill_(0.5);
  }
  nn::Linear spare;
};

TEST(DeviceMemory, ARefusalAtTheEndOfBackwardTakesItsGradientsWithIt) {
  install_host_allocator();
  Config c;
  c.stage = 2;
  c.unit_bytes = 64 << 10;  // the large weights need no buckets
  const auto run = [&](bool refused) {
    return of_rank_zero(2, [&](auto group) {
      auto net = std::make_shared<WideWithALayerToSpare>();
      auto capped = c;
      capped.device_memory = int64_t{512} << 20;
      Engine engine(net, AdamW{.lr = 1e-2}, capped, group);
      group->barrier("all have their engines");
      if (refused) {
        at::Tensor filler;
        if (group->rank() == 0) {
          const int64_t held = group->ledger()->device().current + HostAllocator::instance().used();
          filler = torch::empty({capped.device_memory - held - (12 << 20)}, at::kByte);
        }
        group->barrier("there is room for gradients, but not for the spare layer's");
        EXPECT_THAT(refusal([&] { step_on_rows(engine, *net, 5); }),
                    HasSubstr("of gradient_buckets"));
        group->barrier("all were refused");
      }
      group->barrier("the filler is gone");
      step_on_rows(engine, *net, 3);
      const HostScope scope;
      return weights(engine);
    });
  };
  expect_equal(run(true), run(false));
}

TEST(DeviceMemory, ChoicesGetCheaperInTheOrderOfTheirTraffic) {
  constexpr int64_t kGiB = 1 << 30;
  Config c;
  c.bf16 = true;
  const StepSize size{.parameters = kGiB, .largest_parameter = 1 << 20, .ranks = 4};
  const auto all = cheaper_choices(c, size);
  std::vector<std::string> texts;
  for (const auto& choice : all) texts.push_back(choice.what);
  const std::string optimizer = "offload_optimizer.device \"cpu\" (--offload-optimizer cpu)";
  EXPECT_EQ(texts,
            (std::vector<std::string>{
                "stage 1", "stage 2", "stage 2, " + optimizer, "stage 3, " + optimizer,
                "stage 3, " + optimizer + ", offload_param.device \"cpu\" (--offload-param cpu)"}));
  for (size_t i = 1; i < all.size(); ++i) EXPECT_GT(all[i].bytes, all[i - 1].bytes);
  EXPECT_EQ(all[0].bytes, 9 * kGiB);  // 12 of the optimizer, of which a quarter stays
  // Where all is on the host there is nothing more to move.
  c.stage = 3;
  EXPECT_TRUE(cheaper_choices(all_on_host(c), size).empty());
  // Alone there is nobody to shard with, but gradients can leave as they are ready.
  Config alone;
  const auto of_one = cheaper_choices(alone, {.parameters = kGiB, .ranks = 1});
  ASSERT_EQ(of_one.size(), 3);
  EXPECT_EQ(of_one[0].what, optimizer);
  EXPECT_EQ(of_one[1].what, "stage 2, " + optimizer);
}

TEST(DeviceMemory, IsReadFromTheConfiguration) {
  const auto c = Config::parse(R"({"device_memory": "2GB"})", 1);
  EXPECT_EQ(c.device_memory, int64_t{2} << 30);
  EXPECT_EQ(Config::parse(c.dump(), 1), c);
  Config negative;
  negative.device_memory = -1;
  EXPECT_THROW(negative.validate(), ConfigError);
}

}  // namespace
}  // namespace zero
