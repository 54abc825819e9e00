// Updates beside backward, through the engine's public interface: the same bits as in `step`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::AllOf;
using testing::HasSubstr;

Config offloaded(const Config& c, const TemporaryFolder& folder) {
  return c.stage == 3 ? all_on_disk(c, folder) : on_disk(c, folder);
}

// Weights and states after five steps with a save, a load and a write by name between them.
std::vector<at::Tensor> states_with_writes(const Config& c, const Optimizer& optimizer, int ranks,
                                           const TemporaryFolder& folder) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, 2);
    engine.set_parameter("a.bias", torch::linspace(-1, 1, 33));
    const auto save = (folder.path() / "save").string();
    engine.save(save);
    train(engine, *net, 1, 2);
    engine.load(save);
    engine.set_lr(3e-3);
    train(engine, *net, 3, 2);
    std::vector<at::Tensor> now;
    for (const auto& name : engine.parameter_names()) {
      now.push_back(engine.parameter(name).clone());
      for (const auto state : optim::state_names(optimizer))
        now.push_back(engine.optimizer_state(name, state).clone());
    }
    return now;
  });
}

TEST(UpdateInBackward, GivesTheSameBits) {
  const TemporaryFolder folder;
  const std::vector<Optimizer> optimizers{AdamW{.lr = 1e-2}, Sgd{.lr = 1e-2}};
  for (const auto& optimizer : optimizers) {
    for (const bool bf16 : {false, true}) {
      for (int ranks = 1; ranks <= 3; ++ranks) {
        for (int stage = 2; stage <= 3; ++stage) {
          SCOPED_TRACE(testing::Message()
                       << "bf16 " << bf16 << ", ranks " << ranks << ", stage " << stage);
          const auto c = config(stage, bf16);
          const auto expected = states_with_writes(c, optimizer, ranks, folder);
          expect_equal(states_with_writes(in_backward(c), optimizer, ranks, folder), expected);
          auto matched = in_backward(c);
          matched.one_sided_gather = false;
          matched.max_live_parameters = 0;
          expect_equal(states_with_writes(matched, optimizer, ranks, folder), expected);
          expect_equal(
              states_with_writes(offloaded(in_backward(c), folder), optimizer, ranks, folder),
              expected);
        }
      }
    }
  }
}

TEST(UpdateInBackward, KeepsNoGradientsAndWritesNoneToDisk) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = all_on_disk(in_backward(config(3, bf16)), folder);
      c.offload_optimizer.gradients = true;       // there are none to lie there
      c.offload_optimizer.pipeline_read = false;  // what is read ahead counts in another step
      Engine engine(net, AdamW{}, c, group);
      EXPECT_EQ(group->ledger()->usage(Category::gradients).peak, 0);
      EXPECT_EQ(engine.memory_formula().gradients, 0);
      train(engine, *net, 2);
      engine.complete_update();
      for (int64_t i = 2; i < 5; ++i) {
        const auto before = engine.disk();
        train(engine, *net, 1, i);
        engine.complete_update();
        EXPECT_LE(engine.disk().read - before.read, engine.traffic_formula().disk_read);
        EXPECT_EQ(engine.disk().written - before.written, engine.traffic_formula().disk_written);
      }
      EXPECT_EQ(group->ledger()->usage(Category::gradients).peak, 0);
    });
  }
}

TEST(UpdateInBackward, ReportsTheSameNorm) {
  run_as_threads(2, [&](auto group) {
    const auto norm_of = [&](const Config& c) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, c, group);
      engine.backward(loss_of(*net, group->rank(), 0));
      return engine.step().grad_norm;
    };
    EXPECT_EQ(norm_of(in_backward(config(2))), norm_of(config(2)));
    EXPECT_EQ(norm_of(in_backward(config(3))), norm_of(config(2)));
  });
}

// A parameter that no rank used keeps weights and moments; one that some rank used does not.
TEST(UpdateInBackward, WaitsWithUnitsThatAreNotWholeOnThisRank) {
  for (const bool one_rank : {false, true}) {
    const auto run = [&](const Config& c) {
      return of_rank_zero(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2, .weight_decay = 0.3}, c, group);
        for (int64_t step = 0; step < 3; ++step) {
          const bool uses = one_rank && group->rank() == 1;
          const auto x = input(group->rank(), step, at::kFloat);
          auto y = torch::tanh(net->a(x));
          if (uses) y = torch::tanh(net->b(y));
          engine.backward(y.pow(2).mean());
          EXPECT_TRUE(engine.step().updated);
        }
        return weights(engine);
      });
    };
    expect_equal(run(in_backward(config(3))), run(config(3)));
  }
}

TEST(UpdateInBackward, TellsWhatItCannotDo) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, in_backward(config(3)), group);
    EXPECT_THAT(message_of<Error>([&] { engine.gradient("a.bias"); }), HasSubstr("are not kept"));
    engine.backward(loss_of(*net, group->rank(), 0));
    EXPECT_THAT(message_of<Error>([&] { engine.backward(loss_of(*net, group->rank(), 0)); }),
                HasSubstr("second backward pass in a step"));
    engine.step();
    {
      const torch::NoGradGuard guard;
      net->c->bias.add_(0.25);
    }
    engine.backward(loss_of(*net, group->rank(), 0));
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                HasSubstr("Parameter 'c.bias' was written"));
  });
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, in_backward(config(3)), group);
    {
      const torch::NoGradGuard guard;
      const Gathered scope(engine, net->c->parameters(), Gathered::Access::write);
      net->c->bias.add_(0.25);
    }
    engine.backward(loss_of(*net, group->rank(), 0));
    EXPECT_TRUE(engine.step().updated);
    const double factor = group->rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
    engine.backward(loss_of(*net, group->rank(), 1) * factor);
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }), HasSubstr("Load the last checkpoint"));
  });
}

// Updates are under way when the user writes.
TEST(UpdateInBackward, AWriteThatIsRefusedIsNotInTheUpdate) {
  for (const auto& c : replicated_and_sharded(2)) {
    SCOPED_TRACE(c.dump());
    const auto run = [&](int ranks, bool writes) {
      return of_rank_zero(ranks, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, in_backward(c), group);
        for (int64_t i = 0; i < 3; ++i) {
          engine.backward(loss_of(*net, group->rank(), i));
          if (writes) {
            const torch::NoGradGuard guard;
            for (const auto& p : net->parameters()) p.add_(1);
            EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                        HasSubstr("'a.weight' was written"));
          }
          EXPECT_TRUE(engine.step().updated);
        }
        return weights(engine);
      });
    };
    for (int ranks = 1; ranks <= 2; ++ranks) expect_equal(run(ranks, true), run(ranks, false));
  }
}

TEST(UpdateInBackward, StatesOfHalfAStepAreNotReadWrittenOrSaved) {
  const TemporaryFolder folder;
  for (int stage = 2; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, in_backward(config(stage, true)), group);
      engine.backward(loss_of(*net, group->rank(), 0));
      const auto expect_refused = [&](auto call) {
        EXPECT_THAT(message_of<Error>(call),
                    HasSubstr("between Engine::backward and Engine::step"));
      };
      expect_refused([&] { engine.parameter("a.bias"); });
      expect_refused([&] { engine.set_parameter("a.bias", torch::ones({33})); });
      expect_refused([&] { engine.optimizer_state("a.bias", "exp_avg"); });
      expect_refused([&] { engine.set_optimizer_state("a.bias", "exp_avg", torch::ones({33})); });
      expect_refused([&] { engine.save((folder.path() / "half").string()); });
      expect_refused([&] { engine.save_full((folder.path() / "half.safetensors").string()); });
      expect_refused([&] { Gathered(engine, {net->a->bias}, Gathered::Access::write); });
      EXPECT_TRUE(engine.step().updated);
      engine.parameter("a.bias");
    });
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// A pass or a step that failed has updated some weights; nothing of it is left after a load.
TEST(UpdateInBackward, ALoadTakesTheEngineOutOfAStepThatFailed) {
  const TemporaryFolder folder;
  for (int stage = 2; stage <= 3; ++stage) {
    for (const bool offloads : {false, true}) {
      for (const bool full : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "stage " << stage << ", offloaded " << offloads << ", full " << full);
        const auto run = [&](bool fails) {
          return of_rank_zero(2, [&](auto group) {
            auto net = std::make_shared<Net>();
            auto c = in_backward(config(stage, true));
            if (offloads) c = offloaded(c, folder);
            Engine engine(net, AdamW{.lr = 1e-2}, c, group);
            const auto file = (folder.path() / "saved").string();
            const auto save = [&] { full ? engine.save_full(file) : engine.save(file); };
            const auto load = [&] {
              full ? engine.load_full(file) : static_cast<void>(engine.load(file));
            };
            train(engine, *net, 2);
            save();
            if (fails) {
              // The pass ends where the first layer's input is, when the others are under way.
              auto x = input(group->rank(), 2, net->a->weight.scalar_type());
              x.requires_grad_();
              x.register_hook([](const at::Tensor&) { throw std::runtime_error("a failed pass"); });
              const auto loss = net->forward(x).to(at::kFloat).pow(2).mean();
              EXPECT_THROW(engine.backward(loss), std::runtime_error);
              EXPECT_THAT(
                  message_of<Error>([&] { engine.backward(loss_of(*net, group->rank(), 2)); }),
                  HasSubstr("load a checkpoint"));
              load();
              const double infinite = std::numeric_limits<double>::infinity();
              engine.backward(loss_of(*net, group->rank(), 2) * infinite);
              EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                          HasSubstr("Load the last checkpoint"));
              load();
            }
            EXPECT_EQ(engine.steps(), 2);
            train(engine, *net, 2, 2);
            auto states = weights(engine);
            states.push_back(engine.optimizer_state("b.weight", "exp_avg_sq"));
            group->barrier("nobody loads any more");
            if (group->rank() == 0) std::filesystem::remove_all(file);
            return states;
          });
        };
        expect_equal(run(true), run(false));
      }
    }
  }
}

// Here all parameters share a unit, which is not whole when the pass fails.
TEST(UpdateInBackward, APassThatFailsBeforeAnyUpdateLeavesNothing) {
  const auto run = [](bool fails) {
    return of_rank_zero(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = in_backward(config(2));
      c.unit_bytes = 1 << 20;
      Engine engine(net, AdamW{.lr = 1e-2}, c, group);
      if (fails) {
        auto hidden = torch::tanh(net->a(input(group->rank(), 2, at::kFloat)));
        hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("a failed pass"); });
        const auto loss = net->c(torch::tanh(net->b(hidden))).pow(2).mean();
        EXPECT_THROW(engine.backward(loss), std::runtime_error);
      }
      train(engine, *net, 2);
      return weights(engine);
    });
  };
  expect_equal(run(true), run(false));
}

TEST(UpdateInBackward, ContradictionsOfTheConfigurationAreNamed) {
  const auto refused = [](auto change) {
    auto c = in_backward(config(3));
    change(c);
    return message_of<Error>([&] { c.validate(); });
  };
  EXPECT_EQ(refused([](Config&) {}), "nothing was thrown");
  EXPECT_THAT(refused([](Config& c) { c.gradient_clipping = 1; }),
              AllOf(HasSubstr("gradient_clipping is 1"), HasSubstr("clip_by_previous_norm")));
  EXPECT_EQ(refused([](Config& c) {
              c.gradient_clipping = 1;
              c.clip_by_previous_norm = true;
            }),
            "nothing was thrown");
  EXPECT_THAT(refused([](Config& c) { c.clip_by_previous_norm = true; }),
              HasSubstr("clip_by_previous_norm is true, but gradient_clipping is 0"));
  EXPECT_THAT(refused([](Config& c) { c.stage = 1; }), HasSubstr("the stage is 1"));
  EXPECT_THAT(refused([](Config& c) { c.offload_optimizer.delayed_update_after = 1; }),
              HasSubstr("delayed_update_after"));
  EXPECT_THAT(refused([](Config& c) { c.gradient_accumulation_steps = 2; }),
              HasSubstr("layer_major_accumulation"));
}

constexpr double kLargest = 0.25;

Config by_previous_norm(Config c) {
  c.gradient_clipping = kLargest;
  c.clip_by_previous_norm = true;
  return c;
}

// The factor of a step after one with the norm `before`.
double factor_after(std::optional<double> before) {
  return before && *before > kLargest ? kLargest / (*before + 1e-6) : 1;
}

const Sgd kSgd{.lr = 0.2};

// Losses of rank 0 and norms, by the formula.
Outcome by_hand(int ranks, int64_t steps) {
  Outcome mine;
  Net net;
  std::optional<double> before;
  for (int64_t step = 0; step < steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto loss = loss_of(net, rank, step);
      loss.backward();
      if (rank == 0) mine.losses.push_back(loss.item<float>());
    }
    double squares = 0;
    for (const auto& p : net.parameters())
      squares += (p.grad() / ranks).square().sum().item<double>();
    mine.norms.push_back(std::sqrt(squares));
    const torch::NoGradGuard guard;
    for (const auto& p : net.parameters()) {
      p.sub_(p.grad(), kSgd.lr * factor_after(before) / ranks);
      p.mutable_grad() = at::Tensor();
    }
    before = mine.norms.back();
  }
  return mine;
}

TEST(ClipByPreviousNorm, EqualsTheFormula) {
  constexpr size_t kSteps = 6;
  for (int ranks = 1; ranks <= 2; ++ranks) {
    const auto expected = by_hand(ranks, kSteps);
    EXPECT_GT(expected.norms.front(), 1.2 * kLargest) << "the second step is clipped";
    std::optional<std::vector<at::Tensor>> first;
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool early : {false, true}) {
        if (early && stage < 2) continue;
        SCOPED_TRACE(testing::Message() << ranks << " ranks, stage " << stage << ", " << early);
        const auto ours = of_rank_zero(ranks, [&](auto group) {
          auto net = std::make_shared<Net>();
          auto c = by_previous_norm(config(stage));
          c.update_in_backward = early;
          Engine engine(net, kSgd, c, group);
          for (size_t i = 0; i < kSteps; ++i) {
            const auto loss = loss_of(*net, group->rank(), static_cast<int64_t>(i));
            if (group->rank() == 0) {
              EXPECT_NEAR(loss.template item<float>(), expected.losses[i], 1e-5);
            }
            engine.backward(loss);
            EXPECT_NEAR(engine.step().grad_norm, expected.norms[i], 1e-5);
          }
          return weights(engine);
        });
        if (!first) first = ours;
        expect_equal(ours, *first);
      }
    }
  }
}

// On one host some units are not whole on a rank in the first step, and wait for its end.
TEST(ClipByPreviousNorm, GivesTheSameBitsAtEveryStage) {
  const auto run = [](World world, const Config& c) {
    return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
      auto model = std::make_shared<Uneven>();
      Engine engine(model, kSgd, c, group);
      Outcome mine;
      const int64_t k = c.gradient_accumulation_steps;
      for (int64_t i = 0; i < 4 * k; ++i) {
        engine.backward(model->loss(group->rank(), i, world.hosts > 1 || k > 1));
        // Backward has begun updates with the largest norm of before.
        const auto lower = [&](bool before_step) {
          if (i == 2 * k && before_step == c.update_in_backward)
            engine.set_gradient_clipping(kLargest / 2);
        };
        lower(true);
        const auto result = engine.step();
        lower(false);
        if (result.boundary) mine.norms.push_back(result.grad_norm);
      }
      mine.weights = weights(engine);
      return mine;
    });
  };
  for (const auto world : {World{1, 2}, kTwoByOne}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        std::optional<Outcome> expected;
        // Stage 1 adds several micro-batches in another order.
        for (int stage = k > 1 ? 2 : 1; stage <= 3; ++stage) {
          for (const bool early : {false, true}) {
            if (early && (k > 1 || stage < 2)) continue;
            SCOPED_TRACE(testing::Message() << world.hosts << " hosts, bf16 " << bf16 << ", k " << k
                                            << ", stage " << stage << ", " << early);
            auto c = by_previous_norm(config(stage, bf16, k));
            c.update_in_backward = early;
            const auto ours = run(world, c);
            if (!expected) expected = ours;
            EXPECT_EQ(ours.norms, expected->norms);
            expect_equal(ours.weights, expected->weights);
          }
        }
      }
    }
  }
}

TEST(ClipByPreviousNorm, ACheckpointHasTheNorm) {
  const TemporaryFolder folder;
  const auto save = (folder.path() / "save").string();
  double norm = 0;  // of the step before the save
  for (const bool full : {false, true}) {
    const auto run = [&](const Config& c, bool resumes) {
      return of_rank_zero(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        std::optional<Engine> engine;
        engine.emplace(net, kSgd, c, group);
        train(*engine, *net, 1);
        engine->backward(loss_of(*net, group->rank(), 1));
        const auto before = engine->step().grad_norm;
        if (resumes) {
          full ? engine->save_full(save) : engine->save(save);
          train(*engine, *net, 1, 7);
          engine.reset();
          net = std::make_shared<Net>();
          engine.emplace(net, kSgd, c, group);
          full ? engine->load_full(save) : static_cast<void>(engine->load(save));
        }
        if (group->rank() == 0) norm = before;
        train(*engine, *net, 2, 2);
        return weights(*engine);
      });
    };
    for (int stage = 2; stage <= 3; ++stage) {
      for (const bool early : {false, true}) {
        SCOPED_TRACE(testing::Message() << "full " << full << ", stage " << stage << ", " << early);
        auto c = by_previous_norm(config(stage));
        c.update_in_backward = early;
        expect_equal(run(c, true), run(c, false));
      }
    }
    // One rank goes on with the norm of two.
    ASSERT_GT(norm, 1.2 * kLargest);
    auto net = std::make_shared<Net>();
    Engine engine(net, kSgd, in_backward(by_previous_norm(config(2))));
    full ? engine.load_full(save) : static_cast<void>(engine.load(save));
    const auto before = weights(engine);
    auto alone = std::make_shared<Net>();
    {
      const torch::NoGradGuard guard;
      for (size_t i = 0; i < before.size(); ++i) alone->parameters()[i].copy_(before[i]);
    }
    loss_of(*alone, 0, 9).backward();
    engine.backward(loss_of(*net, 0, 9));
    engine.step();
    for (size_t i = 0; i < before.size(); ++i) {
      const auto clipped = alone->parameters()[i].grad() * (kSgd.lr * factor_after(norm));
      EXPECT_TRUE(torch::allclose(weights(engine)[i], before[i] - clipped, 1e-5, 1e-6));
    }
    std::filesystem::remove_all(save);
  }
}

// A step that is left out leaves the norm of the one before it.
TEST(ClipByPreviousNorm, AStepThatIsLeftOutLeavesTheNorm) {
  const auto run = [](bool leaves_out) {
    return of_rank_zero(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, kSgd, by_previous_norm(config(3)), group);
      train(engine, *net, 1);
      if (leaves_out) {
        engine.backward(loss_of(*net, group->rank(), 5) * std::numeric_limits<double>::infinity());
        EXPECT_FALSE(engine.step().updated);
        engine.backward(loss_of(*net, group->rank(), 5) * 100);
        EXPECT_FALSE(engine.step(false).updated);
      }
      train(engine, *net, 2, 1);
      return weights(engine);
    });
  };
  expect_equal(run(true), run(false));
}

}  // namespace
}  // namespace zero
