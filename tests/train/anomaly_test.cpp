// A run whose loss or gradient is not finite says what made it. Ranks are threads.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/train/tiny_run.h"
#include "zero/base/not_finite.h"
#include "zero/train/trainer.h"

namespace zero::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kSpoiled = "h.3.mlp.c_proj.weight";

class Listener final : public Monitor {
 public:
  explicit Listener(std::vector<StepReport>& heard) : heard_(heard) {}
  void step(const StepReport& report) override { heard_.push_back(report); }

 private:
  std::vector<StepReport>& heard_;
};

// The result of a run.
struct Told {
  std::map<int, std::string> errors;  // by rank
  std::vector<StepReport> steps;
  int64_t passes = 0;  // of the spoiled parameter's gradient, on rank 1
};

class Anomaly : public testing::Test {
 protected:
  Anomaly() {
    options_ = tiny_run(
        folder_, "line ",
        R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32,
        "vocab_size": 256, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "resid_pdrop": 0.1})");
    options_.overwrite = true;
    config_.gradient_accumulation_steps = 2;
    config_.unit_bytes = 4096;
  }

  // Trains on two ranks; `prepare` is run on each before the first step.
  Told run(const std::function<void(Trainer&, int rank, Told&)>& prepare) const {
    Told told;
    std::mutex mutex;
    comm::run_as_threads(ranks_, [&](auto group) {
      std::vector<std::unique_ptr<Monitor>> monitors;
      if (group->rank() == 0) monitors.push_back(std::make_unique<Listener>(told.steps));
      Trainer trainer({.engine = config_, .program = options_}, group, std::move(monitors));
      prepare(trainer, group->rank(), told);
      try {
        trainer.train();
      } catch (const NotFinite& error) {
        const std::lock_guard lock(mutex);
        told.errors[group->rank()] = error.what();
      }
    });
    return told;
  }

  // The gradient of a parameter of layer 3 is NaN on rank 1, in micro-batch 2 of step 2 and later.
  static void spoil(Trainer& trainer, int rank, Told& told) {
    if (rank != 1) return;
    auto parameter = trainer.model().module().named_parameters()[kSpoiled];
    parameter.register_hook([&trainer, &told](const at::Tensor& g) {
      const bool second = ++told.passes % 2 == 0;
      return trainer.step() >= 1 && second ? g * 0 / (g * 0) : g;
    });
  }

  int ranks_ = 2;
  test::TemporaryFolder folder_;
  Options options_;
  Config config_;
};

class AnomalyAt : public Anomaly, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, AnomalyAt, testing::Values(0, 1, 2, 3),
                         [](const auto& p) { return "Stage" + std::to_string(p.param); });

TEST_P(AnomalyAt, AStepWithASpoiledGradientIsNamedOnceAndTrainingGoesOn) {
  config_.stage = GetParam();
  for (const bool watches : {false, true}) {
    options_.detect_anomaly = watches;
    const auto told = run(spoil);
    EXPECT_TRUE(told.errors.empty()) << told.errors.begin()->second;
    ASSERT_EQ(told.steps.size(), 4u);
    EXPECT_FALSE(told.steps[0].skipped);
    EXPECT_EQ(told.steps[0].anomaly, "");
    EXPECT_TRUE(told.steps[1].skipped);
    EXPECT_THAT(told.steps[1].anomaly,
                AllOf(HasSubstr("First on rank 1, micro-batch 2, backward: aten::div"),
                      HasSubstr(kSpoiled), HasSubstr("from finite inputs")));
    EXPECT_TRUE(told.steps[2].skipped);
    EXPECT_EQ(told.steps[2].anomaly, "") << "told once";
    EXPECT_EQ(told.passes, watches ? 8 : 10) << "a step is run again where it was not watched";
    EXPECT_THAT(test::read_file(folder_ / "run/log.jsonl"), HasSubstr("\"anomaly\""));
    EXPECT_FALSE(at::hasThreadLocalCallbacks());
  }
}

TEST_P(AnomalyAt, ALossThatIsNotFiniteIsAnErrorOfAllRanksThatNamesTheParameter) {
  config_.stage = GetParam();
  for (const bool watches : {false, true}) {
    options_.detect_anomaly = watches;
    const auto told = run([](Trainer& trainer, int, Told&) {
      trainer.train_step();
      auto weight = trainer.engine().parameter("h.2.attn.c_attn.bias");
      weight.fill_(NAN);
      trainer.engine().set_parameter("h.2.attn.c_attn.bias", weight);
    });
    ASSERT_EQ(told.errors.size(), 2u);
    for (const auto& [rank, error] : told.errors) {
      EXPECT_THAT(error,
                  AllOf(HasSubstr("The loss of step 2 is nan: the run has diverged, and nothing"),
                        HasSubstr("First on rank 0, micro-batch 1, forward: "),
                        HasSubstr("parameter h.2.attn.c_attn."), HasSubstr("a NaN already"),
                        HasSubstr("The last good step was 1."), HasSubstr("A lower --lr")));
    }
  }
}

TEST_F(Anomaly, WithLayerMajorAccumulationTheMicroBatchIsNotTold) {
  config_.stage = 3;
  config_.layer_major_accumulation = true;
  const auto told = run(spoil);
  ASSERT_EQ(told.steps.size(), 4u);
  EXPECT_THAT(told.steps[1].anomaly,
              AllOf(HasSubstr("First on rank 1, micro-batches that passed together, backward: "),
                    HasSubstr(kSpoiled)));
}

TEST_F(Anomaly, AStepThatCannotBeRunAgainSaysHowToWatchIt) {
  config_.stage = 2;
  config_.update_in_backward = true;
  config_.gradient_accumulation_steps = 1;
  config_.gradient_clipping = 0;
  const auto spoil_all = [](Trainer& trainer, int rank, Told&) {
    if (rank != 1) return;
    trainer.model().module().named_parameters()[kSpoiled].register_hook(
        [](const at::Tensor& g) { return g * 0 / (g * 0); });
  };
  for (const bool watches : {false, true}) {
    options_.detect_anomaly = watches;
    const auto told = run(spoil_all);
    ASSERT_EQ(told.errors.size(), 2u);
    EXPECT_THAT(told.errors.at(0),
                watches ? HasSubstr("First on rank 1, micro-batch 1, backward: aten::div")
                        : HasSubstr("With update_in_backward the step cannot be run again"));
    EXPECT_THAT(told.errors.at(0), HasSubstr("No step before it has updated the weights."));
  }
}

TEST_F(Anomaly, AnOverflowAtTheLeastLossScaleIsNamedAndOneAboveItIsNot) {
  config_.fp16 = true;
  config_.loss_scaling = {.initial_power = 1, .hysteresis = 1, .minimum = 1};
  const auto told = run(spoil);
  ASSERT_EQ(told.steps.size(), 2u);
  EXPECT_TRUE(told.steps[1].skipped);
  EXPECT_EQ(told.steps[1].anomaly, "") << "the scale comes down";
  ASSERT_EQ(told.errors.size(), 2u);
  EXPECT_THAT(told.errors.at(1),
              AllOf(HasSubstr("at its minimum already"),
                    HasSubstr("First on rank 1, micro-batch 2, backward: aten::div"),
                    HasSubstr(kSpoiled), HasSubstr("The last good step was 1.")));
}

// The watch changes nothing that it looks at. Ranks that are threads share a generator: one alone.
TEST_F(Anomaly, AWatchedRunHasTheSameLosses) {
  ranks_ = 1;
  for (const int stage : {0, 3}) {
    config_.stage = stage;
    std::vector<std::vector<float>> losses;
    for (const bool watches : {false, true}) {
      options_.detect_anomaly = watches;
      const auto told = run([](Trainer&, int, Told&) {});
      auto& mine = losses.emplace_back();
      for (const auto& step : told.steps) {
        EXPECT_EQ(step.anomaly, "");
        mine.push_back(step.loss);
      }
    }
    ASSERT_EQ(losses[0].size(), 4u);
    EXPECT_EQ(losses[0], losses[1]);
  }
}

}  // namespace
}  // namespace zero::train
