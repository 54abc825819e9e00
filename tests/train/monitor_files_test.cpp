// Tests the files of the monitors `tensorboard` and `csv_monitor`. Only published parts of the
// formats are written out here; in tensorboard_test.cpp the package reads the event files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <protozero/pbf_reader.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.h"
#include "zero/base/crc.h"
#include "zero/base/error.h"
#include "zero/train/monitors.h"

namespace zero::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

// --- Event files ---

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

/// The messages of a file whose framing is right.
std::vector<std::string> messages_of(const fs::path& path) {
  const auto masked = [](std::string_view bytes) {
    const uint32_t check = crc32c(bytes);
    return std::rotr(check, 15) + 0xa282ead8u;
  };
  const std::string file = test::read_file(path);
  std::vector<std::string> messages;
  for (std::string_view left = file; !left.empty();) {
    const auto length = little_endian(left.substr(0, 8));
    EXPECT_EQ(little_endian(left.substr(8, 4)), masked(left.substr(0, 8)));
    messages.emplace_back(left.substr(12, length));
    EXPECT_EQ(little_endian(left.substr(12 + length, 4)), masked(messages.back()));
    left.remove_prefix(16 + length);
  }
  return messages;
}

/// A step, and a scalar's value.
using Point = std::pair<int64_t, float>;
/// The curves by their tags.
using Curves = std::map<std::string, std::vector<Point>>;

void add_curves(Curves& curves, const fs::path& path) {
  for (const auto& message : messages_of(path)) {
    int64_t step = 0;
    for (protozero::pbf_reader event(message); event.next();) {
      if (event.tag() == 2) {
        step = event.get_int64();
      } else if (event.tag() == 5) {
        for (auto summary = event.get_message(); summary.next();) {
          auto value = summary.get_message();
          value.next();
          const auto tag = value.get_string();
          if (value.next() && value.tag() == 2) curves[tag].emplace_back(step, value.get_float());
        }
      } else {
        event.skip();
      }
    }
  }
}

RunInfo run_of(int64_t first_step, int64_t first_sample) {
  RunInfo run;
  run.first_step = first_step;
  run.first_sample = first_sample;
  run.ranks = 2;
  run.accumulate = 3;
  run.micro_batch = 4;
  run.config_json = R"({"train": {"seq": 16}})";
  return run;
}

/// Steps [first, last], whose losses are their numbers.
void train(Monitor& monitor, const RunInfo& run, int64_t last) {
  monitor.begin(run);
  for (int64_t step = run.first_step; step <= last; ++step)
    monitor.step({.step = step, .loss = static_cast<float>(step)});
}

class MonitorFiles : public ::testing::Test {
 protected:
  Curves curves() const {
    auto files = event_files(folder_.path());
    std::sort(files.begin(), files.end());
    Curves all;
    for (const auto& file : files) add_curves(all, file);
    return all;
  }
  std::string csv(const std::string& name) const { return test::read_file(folder_ / name); }

  test::TemporaryFolder folder_;
};

TEST_F(MonitorFiles, OfEventsBeginWithTheVersion) {
  train(*tensorboard_monitor(folder_.path(), false), run_of(1, 0), 1);
  const auto files = event_files(folder_.path());
  ASSERT_THAT(files, SizeIs(1));
  EXPECT_THAT(files[0].filename().string(), ::testing::StartsWith("events.out.tfevents."));
  // The first 12 bytes of every event file: a message of 24 bytes.
  EXPECT_EQ(test::read_file(files[0]).substr(0, 12),
            std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22", 12));
  EXPECT_THAT(messages_of(files[0])[0], HasSubstr("brain.Event:2"));
}

TEST_F(MonitorFiles, OfEventsHaveDeepSpeedsNamesBySamplesAndTheRestBySteps) {
  const auto monitor = tensorboard_monitor(folder_.path(), false);
  monitor->begin(run_of(1, 0));
  monitor->step({.step = 1, .loss = 2, .grad_norm = 3, .loss_scale = 256, .lr = 0.5});
  monitor->step({.step = 2, .loss = NAN, .memory_peak = 4096});
  monitor->validation({.step = 2, .loss = 7, .accuracy = Accuracy{1, 4}});
  const auto all = curves();
  EXPECT_THAT(all.at("Train/Samples/lr"), ElementsAre(Point(24, 0.5f), Point(48, 0.0f)));
  EXPECT_THAT(all.at("Train/Samples/loss_scale"), ElementsAre(Point(24, 256.0f)));
  EXPECT_EQ(all.at("Train/Samples/train_loss")[0], Point(24, 2.0f));
  EXPECT_TRUE(std::isnan(all.at("Train/Steps/loss")[1].second));
  EXPECT_THAT(all.at("Train/Steps/loss_scale"), ElementsAre(Point(1, 256.0f)));
  EXPECT_EQ(all.at("Train/Steps/grad_norm")[0], Point(1, 3.0f));
  EXPECT_EQ(all.at("Train/Steps/memory_peak")[1], Point(2, 4096.0f));
  EXPECT_THAT(all.at("Validation/Steps/loss"), ElementsAre(Point(2, 7.0f)));
  EXPECT_THAT(all.at("Validation/Steps/accuracy"), ElementsAre(Point(2, 0.25f)));
  for (const char* name : {"lr", "tokens_per_s", "step_ms", "comm_ms", "disk_ms"})
    EXPECT_THAT(all.at(std::string("Train/Steps/") + name), SizeIs(2)) << name;
}

TEST_F(MonitorFiles, OfEventsGoOnWhereTheRunGoesOn) {
  // 24 samples a step, and then of another batch: samples and steps differ.
  train(*tensorboard_monitor(folder_.path(), false), run_of(1, 0), 40);
  auto later = run_of(31, 720);
  later.micro_batch = 8;
  train(*tensorboard_monitor(folder_.path(), true), later, 35);
  EXPECT_THAT(event_files(folder_.path()), SizeIs(2));
  std::vector<Point> steps;
  std::vector<Point> samples;
  for (int64_t step = 1; step <= 35; ++step) {
    const auto loss = static_cast<float>(step);
    steps.emplace_back(step, loss);
    samples.emplace_back(step <= 30 ? 24 * step : 720 + 48 * (step - 30), loss);
  }
  EXPECT_EQ(curves().at("Train/Steps/loss"), steps);
  EXPECT_EQ(curves().at("Train/Samples/train_loss"), samples);

  train(*tensorboard_monitor(folder_.path(), false), run_of(1, 0), 1);
  EXPECT_THAT(curves().at("Train/Steps/loss"), ElementsAre(Point(1, 1.0f)))
      << "the earlier run is replaced";
}

TEST_F(MonitorFiles, OfEventsLoseARecordThatIsNotWhole) {
  train(*tensorboard_monitor(folder_.path(), false), run_of(1, 0), 2);
  const auto file = event_files(folder_.path())[0];
  const auto whole = test::read_file(file);
  const auto first = whole.substr(0, 40);  // a record of 12 + 24 + 4 bytes
  auto wrong = first;
  wrong.back() ^= 1;
  const std::vector<std::string> torn{first.substr(0, 1),
                                      first.substr(0, 11),
                                      first.substr(0, 13),
                                      first.substr(0, 39),
                                      wrong,
                                      std::string(20, '\xff'),
                                      std::string(4096, '\0')};
  for (const auto& behind : torn) {
    test::write_file(file, whole + behind);
    tensorboard_monitor(folder_.path(), true)->begin(run_of(3, 48));
    EXPECT_EQ(test::read_file(file), whole) << behind.size();
  }
}

TEST_F(MonitorFiles, OfOtherProgramsAreLeftAlone) {
  const std::string other = folder_ / "events.out.tfevents.0000000001.host.1.0";
  test::write_file(other, "of another program");
  train(*tensorboard_monitor(folder_.path(), false), run_of(1, 0), 1);
  train(*tensorboard_monitor(folder_.path(), true), run_of(2, 24), 2);
  EXPECT_EQ(test::read_file(other), "of another program");
}

// --- CSV ---

TEST_F(MonitorFiles, OfCsvHaveDeepSpeedsNamesAndColumns) {
  const auto monitor = csv_monitor(folder_.path(), false);
  monitor->begin(run_of(1, 0));
  monitor->step({.step = 1, .loss = 0.1f, .lr = 0.1, .memory_peak = 123456789012});
  monitor->step({.step = 2, .loss = INFINITY, .loss_scale = 2, .lr = 1});
  monitor->validation({.step = 2, .loss = 3.5});
  EXPECT_EQ(csv("Train_Samples_lr.csv"), "step,lr\n24,0.1\n48,1\n");
  EXPECT_EQ(csv("Train_Samples_train_loss.csv"),
            "step,train_loss\n24,0.10000000149011612\n48,inf\n")
      << "the float, to the bit";
  EXPECT_EQ(csv("Train_Samples_loss_scale.csv"), "step,loss_scale\n48,2\n");
  EXPECT_EQ(csv("Train_Steps_memory_peak.csv"), "step,memory_peak\n1,123456789012\n2,0\n");
  EXPECT_EQ(csv("Validation_Steps_loss.csv"), "step,loss\n2,3.5\n");
  EXPECT_THAT(csv_files(folder_.path()), SizeIs(13));
  monitor->validation({.step = 2, .loss = 3, .accuracy = Accuracy{3, 4}});
  EXPECT_EQ(csv("Validation_Steps_accuracy.csv"), "step,accuracy\n2,0.75\n");
}

TEST_F(MonitorFiles, OfCsvGoOnWhereTheRunGoesOn) {
  train(*csv_monitor(folder_.path(), false), run_of(1, 0), 12);
  test::write_file(folder_ / "Train_Steps_step_ms.csv", "step,step_ms\n1,5\n2,");
  test::write_file(folder_ / "Train_Steps_comm_ms.csv", "step,co");
  train(*csv_monitor(folder_.path(), true), run_of(3, 48), 4);
  EXPECT_EQ(csv("Train_Steps_loss.csv"), "step,loss\n1,1\n2,2\n3,3\n4,4\n");
  EXPECT_EQ(csv("Train_Samples_train_loss.csv"), "step,train_loss\n24,1\n48,2\n72,3\n96,4\n");
  EXPECT_EQ(csv("Train_Steps_step_ms.csv"), "step,step_ms\n1,5\n3,0\n4,0\n");
  EXPECT_EQ(csv("Train_Steps_comm_ms.csv"), "step,comm_ms\n3,0\n4,0\n");
  train(*csv_monitor(folder_.path(), false), run_of(1, 0), 1);
  EXPECT_EQ(csv("Train_Steps_loss.csv"), "step,loss\n1,1\n") << "the earlier run is replaced";
}

// --- Errors ---

TEST_F(MonitorFiles, ThatCannotBeWrittenAreNamed) {
  fs::create_symlink("/dev/full", folder_ / "Train_Steps_loss.csv");
  const auto csv = csv_monitor(folder_.path(), false);
  csv->begin(run_of(1, 0));
  EXPECT_THAT(
      [&] { csv->step({.step = 1}); },
      ThrowsMessage<Error>(AllOf(HasSubstr("Train_Steps_loss.csv"), HasSubstr("No space left"))));
  const auto gone = tensorboard_monitor(folder_ / "none", false);
  EXPECT_THAT([&] { gone->begin(run_of(1, 0)); },
              ThrowsMessage<ConfigError>(HasSubstr("Cannot open the event file")));
}

class MonitorFolders : public ::testing::Test {
 protected:
  MonitorFolders() {
    options_.out = folder_ / "run";
    options_.tensorboard.enabled = true;
  }
  std::string refusal() const {
    try {
      check_monitors(options_);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }

  test::TemporaryFolder folder_;
  Options options_;
};

TEST_F(MonitorFolders, AreThoseOfDeepSpeedOrTheRuns) {
  options_.csv_monitor = {.enabled = true, .output_path = folder_ / "logs", .job_name = "job"};
  check_monitors(options_);
  EXPECT_FALSE(fs::exists(options_.out)) << "checking changes nothing";
  EXPECT_THAT(make_monitors(options_), SizeIs(2));
  EXPECT_TRUE(fs::is_directory(folder_ / "run/DeepSpeedJobName"));
  EXPECT_TRUE(fs::is_directory(folder_ / "logs/job"));
  options_.csv_monitor.job_name = "";
  options_.tensorboard.enabled = false;
  EXPECT_THAT(make_monitors(options_), SizeIs(1));
  options_.csv_monitor.enabled = false;
  EXPECT_THAT(make_monitors(options_), IsEmpty());
  options_.flops_profiler = {.enabled = true, .output_file = folder_ / "flops.txt"};
  EXPECT_THAT(make_monitors(options_), SizeIs(1));
}

TEST_F(MonitorFolders, ThatCannotBeMadeAreRefused) {
  test::write_file(folder_ / "file", "");
  options_.tensorboard.output_path = folder_ / "file";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("The folder of tensorboard is"),
                               HasSubstr("file is not a folder"), HasSubstr("--tensorboard")));
  EXPECT_THROW(make_monitors(options_), ConfigError);
}

TEST_F(MonitorFolders, AreOfOneRun) {
  const fs::path folder = folder_ / "shared";
  fs::create_directory(folder);
  options_.tensorboard = {.enabled = true, .output_path = folder, .job_name = ""};
  test::write_file(folder / "events.out.tfevents.0000000001.host.1.0", "of another program");
  EXPECT_EQ(refusal(), "");
  tensorboard_monitor(folder, false)->begin(run_of(1, 0));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("holds an earlier run's events.out.tfevents."),
                               HasSubstr("--overwrite"), HasSubstr("--resume")));
  options_.resume = true;
  EXPECT_EQ(refusal(), "");
  options_.resume = false;
  options_.csv_monitor = std::exchange(options_.tensorboard, {});
  EXPECT_EQ(refusal(), "") << "each looks for its own";
  train(*csv_monitor(folder, false), run_of(1, 0), 1);
  EXPECT_THAT(refusal(), HasSubstr("Train_Samples_train_loss.csv"));
  options_.overwrite = true;
  EXPECT_EQ(refusal(), "");
}

}  // namespace
}  // namespace zero::train
