// Tests the reports of a run with `flops_profiler`. Ranks are threads.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/train/tiny_run.h"
#include "zero/train/trainer.h"

namespace zero::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Json = nlohmann::json;

class StepListener final : public Monitor {
 public:
  explicit StepListener(std::vector<StepReport>& heard) : heard_(heard) {}
  void step(const StepReport& report) override { heard_.push_back(report); }

 private:
  std::vector<StepReport>& heard_;
};

class Flops : public testing::Test {
 protected:
  Flops() {
    options_ = tiny_run(folder_, "line ",
                        R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2,
        "n_positions": 32, "vocab_size": 256, "embd_pdrop": 0.1, "attn_pdrop": 0.0})");
    options_.overwrite = true;
    options_.flops_profiler.enabled = true;
    config_.gradient_accumulation_steps = 2;
    config_.unit_bytes = 4096;
  }

  std::vector<StepReport> run() const {
    std::vector<StepReport> steps;
    comm::run_as_threads(2, [&](auto group) {
      std::vector<std::unique_ptr<Monitor>> monitors;
      if (group->rank() == 0) monitors.push_back(std::make_unique<StepListener>(steps));
      Trainer({.engine = config_, .program = options_}, group, std::move(monitors)).train();
      EXPECT_FALSE(at::hasThreadLocalCallbacks());
    });
    return steps;
  }

  // MACs of a step of a rank: B T (L (12 C^2 + 2 T C) + C V) for each micro-batch.
  static constexpr int64_t kMacs = 2 * (2 * 16) * (2 * (12 * 16 * 16 + 2 * 16 * 16) + 16 * 256);

  test::TemporaryFolder folder_;
  Options options_;
  Config config_;
};

TEST_F(Flops, OfOneStepAreTheFormulasAtEachStageAndWithLayerMajor) {
  for (const int stage : {0, 3}) {
    for (const bool layer_major : {false, true}) {
      config_.stage = stage;
      config_.layer_major_accumulation = layer_major;
      const auto steps = run();
      ASSERT_EQ(steps.size(), 4u);
      for (const auto& step : steps) EXPECT_EQ(step.flops.has_value(), step.step == 2);
      const auto& flops = steps[1].flops->step;
      EXPECT_EQ(flops.model.total.macs, kMacs) << stage << layer_major;
      EXPECT_EQ(flops.step, 2);
      EXPECT_EQ(flops.ranks, 2);
      EXPECT_EQ(flops.step_ms, steps[1].step_ms);
      EXPECT_GT(flops.peak, 0);
      EXPECT_GT(flops.mfu(), 0);
    }
  }
}

TEST_F(Flops, AreOfTheLastStepOfAShortRunAndOfNoneWithoutTheSection) {
  options_.flops_profiler.profile_step = 10;
  EXPECT_TRUE(run().back().flops);
  options_.flops_profiler.profile_step = 0;
  EXPECT_TRUE(run().front().flops);
  options_.flops_profiler.enabled = false;
  for (const auto& step : run()) EXPECT_FALSE(step.flops);
}

TEST_F(Flops, GoToTheFileTheConsoleAndTheLog) {
  options_.flops_profiler.recompute_fwd_factor = 0.5;
  options_.flops_profiler.output_file = folder_ / "flops.txt";
  test::write_file(folder_ / "flops.txt", "an earlier report");
  testing::internal::CaptureStdout();
  const auto steps = run();
  const auto told = testing::internal::GetCapturedStdout();
  EXPECT_THAT(told,
              AllOf(HasSubstr("FLOPs of step 2, of rank 0 of 2"), HasSubstr("2.5 x forward"),
                    HasSubstr("MFU"), HasSubstr("modules in " + (folder_ / "flops.txt").string())));
  EXPECT_THAT(told, testing::Not(HasSubstr("the largest modules")));
  EXPECT_EQ(test::read_file(folder_ / "flops.txt"),
            flops_report(steps[1].flops->step, steps[1].flops->options));
  options_.flops_profiler.output_file = "";
  testing::internal::CaptureStdout();
  run();
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              AllOf(HasSubstr("the largest modules"), HasSubstr("\n        c_attn ")));

  Json event;
  std::istringstream lines(test::read_file(folder_ / "run/log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    if (auto object = Json::parse(line); object.value("event", "") == "flops") event = object;
  }
  EXPECT_EQ(event["step"], 2);
  EXPECT_EQ(event["macs"], kMacs);
  EXPECT_EQ(event["flops_backward"], 2.5 * event["flops"].get<double>());
  EXPECT_GT(event["mfu"], 0.0);
  EXPECT_EQ(event["modules"][0]["module"], "");
  EXPECT_EQ(event["modules"][0]["macs"], kMacs);
  std::set<std::string> names;
  for (const auto& module : event["modules"]) names.insert(module["module"]);
  EXPECT_TRUE(names.contains("h.1.mlp.c_fc"));
}

}  // namespace
}  // namespace zero::train
