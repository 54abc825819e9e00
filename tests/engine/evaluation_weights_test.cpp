// Weights for evaluation (Engine::optimizer_eval): they are the mean that the algorithm says, in
// the same bits wherever states lie, and training goes on as if nobody had looked at them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"

namespace zero {
namespace {

using ::testing::HasSubstr;

const ScheduleFreeAdamW kOptimizer{.lr = 1e-2, .weight_decay = 0.1, .warmup_steps = 3};

// Weights as the model shows them, in fp32 and in its own dtype, and what it computes.
std::vector<at::Tensor> shown(Engine& engine, Net& net) {
  auto all = weights(engine);
  // Only rank 0 is shown them.
  engine.visit_parameters(
      [&](const std::string&, const at::Tensor& value) { all.push_back(value.clone()); });
  const torch::NoGradGuard no_grad;
  all.push_back(loss_of(net, 0, 17));
  return all;
}

std::vector<at::Tensor> states(Engine& engine) {
  auto all = weights(engine);
  for (const auto& name : engine.parameter_names()) {
    for (const auto* state : {"z", "exp_avg_sq"})
      all.push_back(engine.optimizer_state(name, state).clone());
  }
  return all;
}

// The weights for evaluation by their formula, from what the engine says of the weights of
// training.
std::vector<at::Tensor> mean_of(Engine& engine) {
  std::vector<at::Tensor> means;
  const double beta1 = kOptimizer.beta1;
  for (const auto& name : engine.parameter_names()) {
    const auto y = engine.parameter(name).to(at::kDouble);
    const auto z = engine.optimizer_state(name, "z").to(at::kDouble);
    means.push_back((y - z * (1 - beta1)) / beta1);
  }
  return means;
}

// Returns the weights that an evaluation after each second step shows, if it `evaluates`, and the
// last states.
std::vector<at::Tensor> run(const Config& c, int ranks, bool evaluates) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, kOptimizer, c, group);
    std::vector<at::Tensor> seen;
    for (int64_t step = 0; step < 6; step += 2) {
      train(engine, *net, 2, step);
      if (!evaluates) continue;
      engine.complete_update();
      const auto means = mean_of(engine);
      engine.optimizer_eval();
      engine.optimizer_eval();  // does nothing
      const auto now = shown(engine, *net);
      for (size_t i = 0; i < means.size(); ++i)
        EXPECT_TRUE(torch::allclose(now[i].to(at::kDouble), means[i], 1e-5, 1e-7)) << i;
      engine.optimizer_train();
      engine.optimizer_train();
      seen.insert(seen.end(), now.begin(), now.end());
    }
    engine.complete_update();
    const auto last = states(engine);
    seen.insert(seen.end(), last.begin(), last.end());
    return seen;
  });
}

TEST(EvaluationWeights, AreTheSameBitsEverywhereAndTrainingGoesOnAsWithoutThem) {
  const TemporaryFolder folder;
  auto split = config(0, true);
  split.split_master_weights = true;
  auto half = config(0);
  half.fp16 = true;
  half.loss_scaling = {.initial_power = 4};
  for (const auto& replicated : {config(0), config(0, true), split, half}) {
    for (const int ranks :
         replicated.bf16 || replicated.fp16 ? std::vector{3} : std::vector{1, 3}) {
      SCOPED_TRACE(testing::Message()
                   << "bf16 " << replicated.bf16 << " fp16 " << replicated.fp16 << " split "
                   << replicated.split_master_weights << " ranks " << ranks);
      const auto expected = run(replicated, ranks, true);
      const auto without = run(replicated, ranks, false);
      expect_equal({expected.end() - static_cast<std::ptrdiff_t>(without.size()), expected.end()},
                   without);
      const auto same = [&](const char* what, const Config& c) {
        SCOPED_TRACE(testing::Message() << "stage " << c.stage << ", " << what);
        expect_equal(run(c, ranks, true), expected);
      };
      auto c = replicated;
      for (c.stage = 1; c.stage <= 3; ++c.stage) {
        same("in memory", c);
        same("on disk", on_disk(c, folder));
        if (!c.split_master_weights) same("on the host", optimizer_on_host(c));
      }
      c.stage = 3;
      same("all on disk", all_on_disk(c, folder));
      if (!c.fp16) same("all on disk, in backward", in_backward(all_on_disk(c, folder)));
      if (!c.split_master_weights) same("all on the host", all_on_host(c));
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(EvaluationWeights, ASaveKeepsTheWeightsOfTraining) {
  const TemporaryFolder folder;
  for (const int stage : {0, 2, 3}) {
    for (const bool bf16 : {false, true}) {
      for (const bool evaluates : {false, true}) {
        SCOPED_TRACE(testing::Message() << stage << bf16 << evaluates);
        comm::run_as_threads(2, [&](auto group) {
          auto net = std::make_shared<Net>();
          Engine engine(net, kOptimizer, config(stage, bf16), group);
          train(engine, *net, 3);
          if (evaluates) engine.optimizer_eval();
          const auto before = shown(engine, *net);
          engine.save((folder.path() / "sharded").string());
          engine.save_full((folder.path() / "full").string());
          expect_equal(shown(engine, *net), before);
          engine.optimizer_train();
          train(engine, *net, 2, 3);
          const auto straight = states(engine);
          engine.optimizer_eval();  // a load ends it
          engine.load((folder.path() / "sharded").string());
          train(engine, *net, 2, 3);
          expect_equal(states(engine), straight);
          engine.load_full((folder.path() / "full").string());
          train(engine, *net, 2, 3);
          expect_equal(states(engine), straight);
        });
      }
    }
  }
}

// A parameter that has had no gradient has no second iterate yet.
TEST(EvaluationWeights, OfAParameterWithoutUpdatesAreItsWeights) {
  auto net = std::make_shared<Net>();
  Engine engine(net, kOptimizer, config(0));
  const auto initial = weights(engine);
  engine.optimizer_eval();
  expect_equal(weights(engine), initial);
  engine.optimizer_train();
  const auto x = input(0, 0, at::kFloat);
  engine.backward((net->a(x)).pow(2).mean());  // one layer alone
  engine.step();
  engine.optimizer_eval();
  EXPECT_FALSE(torch::equal(engine.parameter("a.weight"), initial[0]));
  for (const auto* name : {"b.weight", "c.bias"})
    EXPECT_TRUE(
        torch::equal(engine.parameter(name), initial[std::string(name) == "b.weight" ? 2 : 5]));
}

TEST(EvaluationWeights, AreInForceAfterASaveThatFailed) {
  const TemporaryFolder folder;
  std::ofstream(folder / "notes") << "mine";
  auto net = std::make_shared<Net>();
  Engine engine(net, kOptimizer, config(1));
  train(engine, *net, 3);
  engine.optimizer_eval();
  const auto before = shown(engine, *net);
  EXPECT_THROW(engine.save(folder.path().string()), CheckpointError);
  EXPECT_THROW(engine.save_full((folder / "no/folder").string()), CheckpointError);
  expect_equal(shown(engine, *net), before);
}

TEST(EvaluationWeights, OfOtherOptimizersAreThoseOfTraining) {
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{}, config(0));
  train(engine, *net, 1);
  const auto before = weights(engine);
  engine.optimizer_eval();
  expect_equal(weights(engine), before);
  train(engine, *net, 1, 1);
  engine.optimizer_train();
}

TEST(EvaluationWeights, RefuseTrainingAndWritesBySayingHow) {
  for (const int stage : {0, 3}) {
    comm::run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, kOptimizer, config(stage), group);
      train(engine, *net, 2);
      const auto trained = states(engine);
      engine.optimizer_eval();
      const auto refused = [&](const std::function<void()>& body) {
        EXPECT_THAT(message_of<Error>(body), HasSubstr("Engine::optimizer_train"));
      };
      refused([&] { engine.backward(loss_of(*net, group->rank(), 0)); });
      refused([&] { loss_of(*net, group->rank(), 0).backward(); });
      refused([&] { engine.step(); });
      refused([&] { engine.set_parameter("a.bias", torch::zeros({33})); });
      refused([&] { engine.set_optimizer_state("a.bias", "z", torch::zeros({33})); });
      refused([&] { Gathered(engine, {}, Gathered::Access::write); });
      if (stage == 0) {
        {
          const torch::NoGradGuard no_grad;
          net->a->bias.add_(1);
        }
        refused([&] { engine.optimizer_train(); });
      }
      engine.optimizer_train();
      expect_equal(states(engine), trained);
      train(engine, *net, 1, 2);
    });
  }
}

TEST(EvaluationWeights, ConfigurationsThatCannotHaveThemAreRefused) {
  const auto refusal = [](const Config& c) {
    return message_of<ConfigError>([&] { Engine(std::make_shared<Net>(), kOptimizer, c); });
  };
  auto narrow = config(0, true);
  narrow.bf16_master_weights_and_grads = true;
  EXPECT_THAT(refusal(narrow), HasSubstr("bf16.bf16_master_weights_and_grads"));
  auto coded = config(0);
  coded.optimizer_states = optim::StateFormat::eight_bit;
  EXPECT_THAT(refusal(coded), HasSubstr("data_types.optimizer_state_dtype"));
  auto delayed = optimizer_on_host(config(2));
  delayed.offload_optimizer.delayed_update_after = 1;
  EXPECT_THAT(refusal(delayed), HasSubstr("offload_optimizer.delayed_update_after"));
}

}  // namespace
}  // namespace zero
