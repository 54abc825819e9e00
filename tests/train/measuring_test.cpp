// Tests what a run measures of its steps: profile, wall_clock_breakdown, comms_logger.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/support/run_program.h"
#include "tests/train/tiny_run.h"
#include "zero/base/error.h"
#include "zero/train/metrics.h"
#include "zero/train/monitor.h"
#include "zero/train/trainer.h"

namespace zero::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class Measuring : public ::testing::Test {
 protected:
  Measuring() {
    settings_.program = tiny_run(
        folder_, "a line to learn, number ",
        R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
        "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
    settings_.engine.stage = 2;
  }

  /// Runs it, and returns what it prints; its log is in `log()`.
  std::string train(int ranks = 2) const {
    testing::internal::CaptureStdout();
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      Trainer(settings_, std::move(group)).train();
    });
    std::fflush(stdout);
    return testing::internal::GetCapturedStdout();
  }
  std::vector<Json> log() const {
    std::istringstream text(test::read_file(folder_ / "run/log.jsonl"));
    std::vector<Json> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(Json::parse(line));
    return lines;
  }
  std::vector<Json> steps() const {
    auto lines = log();
    std::erase_if(lines, [](const Json& line) { return line.contains("event"); });
    return lines;
  }
  Json event(const std::string& name) const {
    for (const auto& line : log()) {
      if (line.value("event", "") == name) return line;
    }
    return nullptr;
  }

  test::TemporaryFolder folder_;
  Settings settings_;
};

TEST_F(Measuring, IsOffByDefault) {
  const auto printed = train();
  EXPECT_THAT(printed, Not(HasSubstr("forward")));
  EXPECT_THAT(printed, Not(HasSubstr("collectives")));
  for (const auto& step : steps()) EXPECT_FALSE(step.contains("breakdown"));
  EXPECT_TRUE(event("comms").is_null());
}

TEST_F(Measuring, BreaksEachStepDown) {
  settings_.program.wall_clock_breakdown = true;
  settings_.program.log_every = 2;
  settings_.engine.gradient_accumulation_steps = 2;
  const auto printed = train();
  size_t lines = 0;
  for (auto at = printed.find("ms: forward "); at != std::string::npos;
       at = printed.find("ms: forward ", at + 1))
    ++lines;
  EXPECT_EQ(lines, 3u) << "of the steps that are printed: 1, 2 and 4\n" << printed;
  ASSERT_EQ(steps().size(), 4u);
  for (const auto& step : steps()) {
    const auto& of = step["breakdown"];
    ASSERT_EQ(of.size(), kBreakdown.size());
    double phases = 0;
    double waits = 0;
    for (const auto* part : {"forward_ms", "backward_ms", "step_ms"}) {
      EXPECT_GT(of[part], 0) << part;
      phases += of[part].get<double>();
    }
    for (const auto* part : {"gather_ms", "reduce_ms", "update_ms", "disk_ms", "control_ms"})
      waits += of[part].get<double>();
    EXPECT_LE(phases, step["step_ms"]);
    EXPECT_LE(waits, phases);
    EXPECT_GT(of["update_ms"], 0);
    EXPECT_EQ(of["disk_ms"], 0);
  }
}

TEST_F(Measuring, BreaksLayerMajorStepsDown) {
  settings_.program.wall_clock_breakdown = true;
  settings_.engine.layer_major_accumulation = true;
  settings_.engine.gradient_accumulation_steps = 2;
  train();
  for (const auto& step : steps()) {
    EXPECT_GT(step["breakdown"]["forward_ms"], 0);
    EXPECT_GT(step["breakdown"]["backward_ms"], 0);
  }
}

TEST_F(Measuring, GivesABreakdownToMonitorsThatDraw) {
  settings_.program.wall_clock_breakdown = true;
  settings_.program.csv_monitor = {.enabled = true, .output_path = folder_ / "csv", .job_name = ""};
  train();
  const auto csv = test::read_file(folder_ / "csv/Train_Breakdown_forward_ms.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 5) << csv;
}

TEST_F(Measuring, TablesCollectivesBySize) {
  settings_.program.comms_logger.enabled = true;
  const auto printed = train();
  EXPECT_THAT(printed, HasSubstr("collectives of rank 0"));
  EXPECT_THAT(printed, HasSubstr("\nreduce_scatter "));
  const auto told = event("comms")["ops"];
  const auto traffic = event("traffic")["per_rank"][0];
  for (const auto* op : {"all_gather", "reduce_scatter"}) {
    int64_t calls = 0;
    int64_t sent = 0;
    for (const auto& each : told) {
      if (each["op"] != op) continue;
      calls += each["calls"].get<int64_t>();
      sent += each["total_bytes"].get<int64_t>() / 2;  // (N - 1) / N
      EXPECT_EQ(each["ranks"], 2);
      EXPECT_GT(each["algorithm_gb_per_s"], 0);
      EXPECT_DOUBLE_EQ(each["bus_gb_per_s"], each["algorithm_gb_per_s"].get<double>() / 2);
      EXPECT_DOUBLE_EQ(each["average_ms"],
                       each["total_ms"].get<double>() / each["calls"].get<double>());
    }
    EXPECT_EQ(calls, traffic[op]["calls"]) << op;
    EXPECT_EQ(sent, traffic[op]["logical_bytes"]) << op;
  }
}

TEST_F(Measuring, TablesTheCollectivesThatAreChosen) {
  settings_.program.comms_logger = {.enabled = true,
                                    .verbose = true,
                                    .prof_all = false,
                                    .debug = true,
                                    .prof_ops = {"reduce_scatter_tensor"}};
  const auto printed = train();
  EXPECT_THAT(printed, HasSubstr("reduce_scatter (gradients of unit 0 ("));
  EXPECT_THAT(printed, Not(HasSubstr("all_gather (")));
  const auto told = event("comms")["ops"];
  EXPECT_GT(told.size(), 0u);
  for (const auto& each : told) EXPECT_EQ(each["op"], "reduce_scatter");
}

TEST(CommsLogger, IsReadFromDeepSpeedsSection) {
  const auto settings = Settings::parse(R"({"wall_clock_breakdown": true, "comms_logger": {
      "enabled": true, "verbose": true, "prof_all": false, "debug": true,
      "prof_ops": ["all_reduce", "all_gather"]}})",
                                        1);
  EXPECT_TRUE(settings.program.wall_clock_breakdown);
  EXPECT_EQ(settings.program.comms_logger, (CommsLogger{.enabled = true,
                                                        .verbose = true,
                                                        .prof_all = false,
                                                        .debug = true,
                                                        .prof_ops = {"all_reduce", "all_gather"}}));
  EXPECT_EQ(Settings::parse(settings.dump(), 1), settings);
  EXPECT_THAT(
      message_of<ConfigError>([] { Settings::parse(R"({"comms_logger": {"prof_ops": [7]}})", 1); }),
      HasSubstr("comms_logger.prof_ops holds 7"));
}

TEST_F(Measuring, SaysWhatIsReadInPlace) {
  settings_.engine.stage = 3;
  settings_.program.comms_logger.enabled = true;
  EXPECT_THAT(train(), HasSubstr("all_gather in place"));
  const auto told = event("comms")["ops"];
  bool any = false;
  for (const auto& each : told) {
    if (!each.contains("in_place")) continue;
    any = true;
    EXPECT_FALSE(each.contains("bus_gb_per_s"));
  }
  EXPECT_TRUE(any);
}

TEST_F(Measuring, WritesTheProfileOfOneStep) {
  const auto file = folder_ / "step.json";
  settings_.program.profile = file;
  settings_.program.profile_step = 2;
  EXPECT_THAT(train(), HasSubstr("profile of step 2 in " + file.string()));
  EXPECT_EQ(event("profile")["step"], 2);
  EXPECT_EQ(event("profile")["dropped"], 0);
  const auto trace = Json::parse(test::read_file(file));
  int64_t forwards = 0;
  for (const auto& event : trace["traceEvents"]) forwards += event["name"] == "forward" ? 1 : 0;
  EXPECT_EQ(forwards, 2) << "one a rank";
}

TEST_F(Measuring, WritesTheProfileOfTheLastStep) {
  const auto file = folder_ / "step.json";
  settings_.program.profile = file;
  settings_.program.profile_step = 4;
  EXPECT_THAT(train(), HasSubstr("profile of step 4 in"));
  EXPECT_TRUE(std::filesystem::exists(file));
}

TEST_F(Measuring, RefusesAProfileThatWouldNotBeWritten) {
  settings_.program.profile = folder_ / "missing/step.json";
  EXPECT_THAT(message_of<ConfigError>([&] { check_run(settings_, 1); }), HasSubstr("--profile"));
  settings_.program.profile = folder_ / "step.json";
  settings_.program.profile_step = 5;
  EXPECT_THAT(message_of<ConfigError>([&] { check_run(settings_, 1); }),
              HasSubstr("of step 5 (train.profile_step), but the run has 4"));
}

}  // namespace
}  // namespace zero::train
