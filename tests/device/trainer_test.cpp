// The training loop of `zero train` with a model on devices: losses near the CPU's, equal at every
// stage, with validation, a sample, checkpoints and a resumed run.
#include "zero/train/trainer.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "tests/device/backend.h"
#include "tests/device/own_operators.h"
#include "tests/device/testing.h"
#include "tests/support/operator_calls.h"
#include "tests/train/tiny_run.h"
#include "zero/train/monitor.h"

namespace zero::simulated {
namespace {

struct Heard {
  std::vector<float> losses;
  std::vector<double> validations;
  std::string text;
  bool operator==(const Heard&) const = default;
};

class Listener final : public train::Monitor {
 public:
  explicit Listener(Heard& heard) : heard_(heard) {}
  void step(const train::StepReport& report) override { heard_.losses.push_back(report.loss); }
  void validation(const train::ValidationReport& report) override {
    heard_.validations.push_back(report.loss);
  }
  void sample(const std::string& /*prompt*/, const std::string& text) override {
    heard_.text = text;
  }

 private:
  Heard& heard_;
};

class TrainerOnDevices : public ::testing::Test {
 protected:
  TrainerOnDevices() {
    options_ = train::tiny_run(
        folder_, "a line to learn, number ",
        R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
        "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
    options_.eval_every = 2;
    options_.eval_tokens = 64;
    options_.sample_tokens = 5;
    options_.overwrite = true;
    options_.schedule = optim::Decay::constant;
  }

  template <class RunRanks>
  Heard run(const RunRanks& ranks, int stage, int64_t accumulate = 1, bool layer_major = false) {
    Config config;
    config.bf16 = bf16_;
    config.stage = stage;
    config.gradient_accumulation_steps = accumulate;
    config.layer_major_accumulation = layer_major;
    config.unit_bytes = 8000;
    Heard heard;
    // One rank: several that are threads would draw their weights from one generator at a time.
    ranks(1, [&](const std::shared_ptr<comm::Group>& group) {
      std::vector<std::unique_ptr<train::Monitor>> listeners;
      if (group->rank() == 0) listeners.push_back(std::make_unique<Listener>(heard));
      train::Trainer trainer({.engine = config, .program = options_}, group, std::move(listeners));
      EXPECT_EQ(trainer.train(), 0);
    });
    synchronize();
    EXPECT_EQ(reports(), "");
    return heard;
  }
  Heard on_devices(int stage, int64_t accumulate = 1, bool layer_major = false) {
    return run(run_on_devices, stage, accumulate, layer_major);
  }

  test::TemporaryFolder folder_;
  train::Options options_;
  bool bf16_ = false;
};

TEST_F(TrainerOnDevices, EachStageHasTheSameLossesNearTheCpus) {
  configure({});
  const auto cpu = run([](int n, const auto& body) { comm::run_as_threads(n, body); }, 3);
  const auto first = on_devices(0);
  ASSERT_EQ(first.losses.size(), 4U);
  ASSERT_EQ(first.validations.size(), 2U);
  EXPECT_EQ(first.text.size(), 5U);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(first.losses[i], cpu.losses[i], 1e-4);
  for (int stage = 1; stage <= 3; ++stage) EXPECT_EQ(on_devices(stage), first) << stage;
}

TEST_F(TrainerOnDevices, LayersMayPassAllMicroBatchesBeforeTheNext) {
  configure({});
  const auto first = on_devices(2, 2, true);
  EXPECT_EQ(first.losses.size(), 4U);
  EXPECT_EQ(on_devices(3, 2, true), first);
}

// GELU and a bias's gradient in the products, as a GPU may have them: no report, the losses of each
// stage the same, and near those without.
TEST_F(TrainerOnDevices, FeedForwardLayersMayUseEpilogues) {
  configure({});
  bf16_ = true;
  const auto without = on_devices(0);
  const OwnOperators own{"linear_gelu", "linear_gelu_backward"};
  const test::OperatorCalls backward("zero::linear_gelu_backward");
  const auto first = on_devices(0);
  EXPECT_EQ(backward.count(), 2 * 4);  // layers, steps
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(first.losses[i], without.losses[i], 1e-2);
  for (const int stage : {2, 3}) EXPECT_EQ(on_devices(stage, 1), first) << stage;
}

TEST_F(TrainerOnDevices, AResumedRunGoesOnAsIfItHadNotEnded) {
  configure({});
  const auto whole = on_devices(3);
  options_.save_every = 2;
  options_.steps = 2;
  (void)on_devices(3);
  options_.steps = 4;
  options_.overwrite = false;
  options_.resume = true;
  const auto rest = on_devices(3);
  ASSERT_EQ(rest.losses.size(), 2U);
  EXPECT_EQ(rest.losses[0], whole.losses[2]);
}

}  // namespace
}  // namespace zero::simulated
