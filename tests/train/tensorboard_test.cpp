// Event files of a run that was resumed, read by TensorBoard's own package, in a Python that has
// it: that of ZERO_TEST_MONITORS, or of scripts/monitors_environment.sh. Without one the test is
// skipped, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/run_program.h"
#include "tests/train/monitors_python.h"
#include "zero/train/metrics.h"
#include "zero/train/monitor.h"

namespace zero::train {
namespace {

using Json = nlohmann::json;

void train(const std::string& folder, int64_t first, int64_t last) {
  const auto monitor = tensorboard_monitor(folder, first > 1);
  RunInfo run;
  run.first_step = first;
  run.first_sample = 8 * (first - 1);
  run.micro_batch = 8;
  run.config_json = R"({"train": {"seq": 16}})";
  monitor->begin(run);
  for (int64_t step = first; step <= last; ++step) {
    monitor->step({.step = step,
                   .loss = 1 / static_cast<float>(step),
                   .grad_norm = 0.5,
                   .loss_scale = 1024,
                   .lr = 1e-3,
                   .breakdown = Breakdown{}});
  }
  monitor->validation({.step = last, .loss = 0.25, .accuracy = Accuracy{3, 4}});
  monitor->sample("a", "b\xff\nc");
}

TEST(Tensorboard, ReadsTheCurvesAndTextsOfAResumedRunWithEachStepOnce) {
  const auto found = monitors_python();
  if (found.empty()) {
    GTEST_SKIP() << "there is no Python with tensorboard: run scripts/monitors_environment.sh, or "
                    "set ZERO_TEST_MONITORS to one";
  }
  const test::TemporaryFolder folder;
  train(folder.path(), 1, 20);
  train(folder.path(), 11, 15);
  const auto outcome =
      test::Program(
          {found, std::string(ZERO_SOURCE) + "/tests/train/read_events.py", folder.path().string()})
          .wait(std::chrono::seconds(250));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto read = Json::parse(outcome.out);
  EXPECT_EQ(read["version"], 2.0);
  Json losses = Json::array();
  Json samples = Json::array();
  for (int64_t step = 1; step <= 15; ++step) {
    const double loss = 1 / static_cast<float>(step);
    losses.push_back({step, loss});
    samples.push_back({8 * step, loss});
  }
  const auto& curves = read["curves"];
  EXPECT_EQ(curves["Train/Steps/loss"], losses) << "to the bit";
  EXPECT_EQ(curves["Train/Samples/train_loss"], samples);
  EXPECT_EQ(curves["Validation/Steps/loss"], Json::parse("[[15, 0.25]]"));
  EXPECT_EQ(curves["Validation/Steps/accuracy"], Json::parse("[[15, 0.75]]"));
  for (const auto& metric : kMetrics)
    EXPECT_TRUE(curves.contains(std::string(metric.name))) << metric.name;
  EXPECT_EQ(curves.size(), kMetrics.size());
  const std::string configuration =
      "    {\n      \"train\": {\n        \"seq\": 16\n      }\n    }";
  EXPECT_EQ(read["texts"]["configuration"],
            Json::array({Json::array({0, configuration}), Json::array({10, configuration})}));
  EXPECT_EQ(read["texts"]["sample"], Json::array({Json::array({15, "    ab\xef\xbf\xbd\n    c"})}));
}

}  // namespace
}  // namespace zero::train
