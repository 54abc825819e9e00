// An offline run that was resumed, read by the package of Weights & Biases itself: by its reader of
// files and its classes of messages. Nothing is sent. Without such a Python (monitors_python.h) the
// test is skipped, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "tests/support/run_program.h"
#include "tests/train/monitors_python.h"
#include "zero/train/metrics.h"
#include "zero/train/monitors.h"

namespace zero::train {
namespace {

using Json = nlohmann::json;

// So that records cross several boundaries of 32 KiB.
constexpr int64_t kSteps = 120, kResumedAt = 81, kLast = 150, kValidated = 100;

StepReport step_report(int64_t step) {
  return {.step = step,
          .loss = 1 / static_cast<float>(step),
          .grad_norm = 0.1 * static_cast<double>(step),
          .loss_scale = 1024,
          .lr = 1e-3 / static_cast<double>(step),
          .step_ms = 12.5,
          .tokens_per_s = 1234.5,
          .memory_peak = int64_t{1} << 40};
}

void train(const std::string& folder, int64_t first, int64_t last, bool ends) {
  const WandbSettings settings{.group = "a group", .team = "a team", .project = "a project"};
  const auto wandb = wandb_monitor(folder, first > 1, settings);
  const auto log = jsonl_monitor(folder + "/log.jsonl", first > 1);
  RunInfo run;
  run.first_step = first;
  run.first_sample = 8 * (first - 1);
  run.micro_batch = 8;
  run.config_json = R"({"train": {"seq": 16}, "text": ")" + std::string(70'000, 'x') + R"("})";
  for (auto* monitor : {wandb.get(), log.get()}) {
    monitor->begin(run);
    for (int64_t step = first; step <= last; ++step) {
      monitor->step(step_report(step));
      if (step == kValidated) monitor->validation({.step = step, .loss = 0.25});
    }
    monitor->sample("a", "b\xff\nc");
    if (ends) monitor->end({.steps = last, .reason = "finished", .model_file = ""});
  }
}

TEST(Wandb, ItsPackageReadsTheNumbersOfTheLogWithEachStepOnce) {
  const auto python = monitors_python();
  if (python.empty()) {
    GTEST_SKIP() << "there is no Python with wandb: run scripts/monitors_environment.sh, or set "
                    "ZERO_TEST_MONITORS to one";
  }
  const test::TemporaryFolder folder;
  train(folder.path(), 1, kSteps, true);
  const auto files = wandb_files(folder.path());
  ASSERT_EQ(files.size(), 1u);
  train(folder.path(), kResumedAt, kLast, true);
  ASSERT_EQ(wandb_files(folder.path()), files) << "the run goes on under its ID";
  const auto outcome =
      test::Program({python, std::string(ZERO_SOURCE) + "/tests/train/read_wandb.py", files[0]})
          .wait(std::chrono::seconds(250));
  constexpr int kNoPackage = 77;
  if (outcome.status == kNoPackage) {
    GTEST_SKIP() << python << " has no wandb that reads runs: run scripts/monitors_environment.sh; "
                 << outcome.err;
  }
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto read = Json::parse(outcome.out);

  ASSERT_EQ(read["runs"].size(), 1u);
  const auto& run = read["runs"][0];
  EXPECT_EQ(run["project"], "a project");
  EXPECT_EQ(run["entity"], "a team");
  EXPECT_EQ(run["group"], "a group");
  EXPECT_EQ(files[0].filename().string(), "run-" + run["id"].get<std::string>() + ".wandb");
  EXPECT_GT(run["start"].get<int64_t>(), int64_t{1'700'000'000} * 1'000'000'000);
  EXPECT_EQ(read["producer"], "libzero");
  EXPECT_EQ(read["config"]["train"], (Json{{"seq", 16}}));
  EXPECT_EQ(read["config"]["text"].get<std::string>().size(), 70'000u);
  EXPECT_EQ(read["metrics"], (Json{{"step", ""},
                                   {"samples", ""},
                                   {"Train/Steps/*", "step"},
                                   {"Train/Breakdown/*", "step"},
                                   {"Validation/Steps/*", "step"},
                                   {"Train/Samples/*", "samples"}}));
  EXPECT_EQ(read["exits"], Json::array({0})) << "that of the first start is cut off";
  for (size_t i = 0; i < read["numbers"].size(); ++i) EXPECT_EQ(read["numbers"][i], i + 1);

  // The log has both starts; of a step the later one counts.
  std::map<int64_t, Json> logged;
  std::istringstream lines(test::read_file(folder / "log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    auto object = Json::parse(line);
    if (object.contains("loss") && !object.contains("event")) logged[object["step"]] = object;
  }
  int64_t step = 0;
  int64_t number = 0;
  for (const auto& row : read["history"]) {
    EXPECT_EQ(row["_step"], number++);
    if (row.contains("Validation/Steps/loss")) {
      EXPECT_EQ(row["Validation/Steps/loss"], 0.25);
      EXPECT_EQ(row["step"], kValidated);
      continue;
    }
    EXPECT_EQ(row["step"], ++step);
    EXPECT_EQ(row["samples"], 8 * step);
    const auto& line = logged.at(step);
    EXPECT_EQ(row["Train/Steps/loss"].get<float>(), line["loss"].get<float>());
    EXPECT_EQ(row["Train/Samples/train_loss"], row["Train/Steps/loss"]);
    EXPECT_EQ(row["Train/Samples/lr"], line["lr"]);
    for (const char* name : {"grad_norm", "lr", "loss_scale", "tokens_per_s", "step_ms", "comm_ms",
                             "disk_ms", "memory_peak"})
      EXPECT_EQ(row[std::string("Train/Steps/") + name], line[name]) << name;
  }
  EXPECT_EQ(step, kLast);
  EXPECT_EQ(number, kLast + 1);
  EXPECT_EQ(read["summary"]["step"], kLast);
  EXPECT_EQ(read["summary"]["Validation/Steps/loss"], 0.25);
  EXPECT_EQ(read["summary"]["sample"], "ab\xef\xbf\xbd\nc");
}

}  // namespace
}  // namespace zero::train
