// Logs are read back as they were written, also where a run died; other files are refused by name.
#include "zero/report/run_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/train/monitor.h"

namespace zero::report {
namespace {

using ::testing::HasSubstr;

std::string config_line(int64_t first_step = 1, const std::string& more = "") {
  return R"({"event":"config","engine":{"zero_optimization":{"stage":2}},)"
         R"("train":{"seq":32,"data":"text"},"model":{},"parameters":1234,"world_size":2,)"
         R"("tokens_per_step":64,"train_tokens":1000,"first_step":)" +
         std::to_string(first_step) + more + "}\n";
}

std::string step_line(int64_t step, const std::string& more = "") {
  return R"({"step":)" + std::to_string(step) +
         R"(,"loss":2.5,"grad_norm":1.25,"lr":0.001,"step_ms":10.0,"comm_ms":2.0,"disk_ms":1.0,)"
         R"("tokens_per_s":6400.0,"memory_peak":4096)" +
         more + "}\n";
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The monitor that writes logs is the other side of what is read here.
TEST(RunLog, HasWhatTheMonitorWrote) {
  const TemporaryFolder folder;
  const auto file = folder / "log.jsonl";
  {
    const auto monitor = train::jsonl_monitor(file, false);
    train::RunInfo info;
    info.config_json = R"({"engine": {}, "train": {"seq": 8}, "model": {}})";
    info.parameters = 77;
    info.ranks = 2;
    info.link = comm::LinkSpeed{.bandwidth = 125e6, .latency = 0.25e-3};
    monitor->begin(info);
    train::StepReport step{.step = 1, .loss = 3.1F, .grad_norm = 0.1, .lr = 1e-3};
    step.loss_scale = 65536;
    step.step_ms = 20;
    step.breakdown = Breakdown{.forward = 5, .backward = 9, .step = 3, .gather = 1, .update = 2};
    step.notices = {"Rank 1 is slow."};
    step.link = {.busy = 8, .nothing_to_send = 7, .processor = 3, .peer_late = 2};
    step.skipped = true;
    monitor->step(step);
    monitor->validation({.step = 1,
                         .loss = 3.5,
                         .tokens = 10,
                         .accuracy = train::Accuracy{.correct = 3, .texts = 4}});
    monitor->saved({.step = 1, .path = "checkpoint-1", .bytes = 2048, .held_ms = 1, .seconds = 2});
    std::vector<train::RankMemory> memory(2);
    memory[1].usage[static_cast<size_t>(Category::optimizer)] = {.current = 5, .peak = 6};
    memory[1].formula[static_cast<size_t>(Category::optimizer)] = 6;
    memory[1].total = {.current = 7, .peak = 8};
    monitor->memory(memory);
    std::vector<train::RankTraffic> traffic(2);
    traffic[0].counts[0].logical_bytes = 100;
    traffic[0].formula[0] = 101;
    traffic[0].link = step.link;
    monitor->traffic(traffic, 1);
    monitor->end({.steps = 1, .seconds = 2, .reason = "finished", .model_file = "m"});
  }
  for (const auto& log : {read_log(folder.path()), read_log(file)}) {
    EXPECT_EQ(log.parameters, 77);
    EXPECT_EQ(log.ranks, 2);
    EXPECT_EQ(log.link.value().bandwidth, 125e6);
    EXPECT_EQ(log.link.value().latency, 0.25e-3);
    EXPECT_EQ(log.setting("train.seq"), "8");
    ASSERT_EQ(log.steps.size(), 1U);
    EXPECT_EQ(static_cast<float>(log.steps[0].loss), 3.1F);
    EXPECT_EQ(log.steps[0].grad_norm, 0.1);
    EXPECT_EQ(log.steps[0].loss_scale, 65536);
    EXPECT_EQ(log.validations.at(0).loss, 3.5);
    EXPECT_EQ(log.validations.at(0).accuracy.value().correct, 3);
    EXPECT_EQ(log.validations.at(0).accuracy.value().texts, 4);
    ASSERT_EQ(log.events.size(), 3U);  // the notice, the save, the skipped step
    EXPECT_EQ(log.events[0].text, "Rank 1 is slow.");
    EXPECT_EQ(log.memory.at(1).usage[static_cast<size_t>(Category::optimizer)].peak, 6);
    EXPECT_EQ(log.memory.at(1).formula[static_cast<size_t>(Category::optimizer)], 6);
    EXPECT_EQ(log.memory.at(1).total.peak, 8);
    EXPECT_EQ(log.traffic.at(0).counts[0].logical_bytes, 100);
    EXPECT_EQ(log.traffic.at(0).formula[0], 101);
    const comm::LinkTimes link{.busy = 8, .nothing_to_send = 7, .processor = 3, .peer_late = 2};
    EXPECT_EQ(log.steps[0].link, link);
    EXPECT_EQ(log.traffic[0].link, link);
    EXPECT_FALSE(log.traffic[1].link);
    ASSERT_TRUE(log.end);
    EXPECT_EQ(log.end->reason, "finished");
    EXPECT_FALSE(log.cut);
  }
}

TEST(RunLog, PartsOfAStepAddUpToItsTime) {
  LoggedStep step{.step_ms = 20, .comm_ms = 3, .disk_ms = 2};
  const auto sum = [&] {
    double all = 0;
    for (const auto& part : time_parts(step)) all += part.ms;
    return all;
  };
  EXPECT_DOUBLE_EQ(sum(), 20);
  step.breakdown =
      Breakdown{.forward = 5, .backward = 9, .step = 3, .gather = 1, .reduce = 1, .update = 2};
  EXPECT_DOUBLE_EQ(sum(), 20);
  EXPECT_DOUBLE_EQ(time_parts(step).front().ms, 13);
}

// A run that went on from a checkpoint tells of its steps again, and so may one that went back.
TEST(RunLog, LaterLinesReplaceStepsThatAreDoneAgain) {
  const TemporaryFolder folder;
  folder.write("log.jsonl", config_line() + step_line(1) + step_line(2) + step_line(3) +
                                R"({"event":"end","reason":"stopped by SIGINT","steps":3})"
                                "\n" +
                                config_line(2, R"(,"changes":["lr 1 -> 2"])") +
                                step_line(2, R"(,"skipped":true)") +
                                step_line(3, R"(,"skipped":true)") +
                                R"({"event":"rewind","from":3,"to":1,"reason":"A spike."})"
                                "\n" +
                                step_line(2));
  const auto log = read_log(folder.path());
  ASSERT_EQ(log.steps.size(), 2U);
  EXPECT_EQ(log.steps[1].step, 2);
  EXPECT_FALSE(log.steps[1].skipped);
  EXPECT_FALSE(log.end);
  ASSERT_EQ(log.events.size(), 2U);
  EXPECT_THAT(log.events[0].text,
              HasSubstr("from the checkpoint of step 1 on 2 ranks; changed: lr 1 -> 2"));
  EXPECT_THAT(log.events[1].text, HasSubstr("went back to the checkpoint of step 1. A spike."));
}

TEST(RunLog, SettingsHaveTheirOrigins) {
  const TemporaryFolder folder;
  folder.write("log.jsonl", config_line());
  const auto origin = [&](const std::string& key) {
    for (const auto& setting : read_log(folder.path()).settings) {
      if (setting.key == key) return setting.origin;
    }
    return std::string("none");
  };
  EXPECT_EQ(origin("train.seq"), "given");
  EXPECT_EQ(origin("zero_optimization.stage"), "given");
  folder.write("log.jsonl", config_line() +
                                R"({"event":"origins","from":{"train":{"seq":"command line"}}})"
                                "\n");
  EXPECT_EQ(origin("train.seq"), "command line");
  EXPECT_EQ(origin("train.data"), "default");
}

TEST(RunLog, LeavesOutALastLineThatIsCut) {
  const TemporaryFolder folder;
  const auto whole = config_line() + step_line(1);
  folder.write("log.jsonl", whole + R"({"step":2,"lo)");
  const auto log = read_log(folder.path());
  EXPECT_TRUE(log.cut);
  EXPECT_EQ(log.steps.size(), 1U);
  // One that lacks its line break alone is whole.
  folder.write("log.jsonl", whole.substr(0, whole.size() - 1));
  EXPECT_FALSE(read_log(folder.path()).cut);
  EXPECT_EQ(read_log(folder.path()).steps.size(), 1U);
}

TEST(RunLog, NamesEventsThatItDoesNotKnow) {
  const TemporaryFolder folder;
  folder.write("log.jsonl", config_line() +
                                R"({"event":"dance","step":1})"
                                "\n" +
                                R"({"event":"dance"})"
                                "\n");
  EXPECT_THAT(read_log(folder.path()).unknown, ::testing::ElementsAre("dance"));
}

TEST(RunLog, RefusesWhatIsNoLogByName) {
  const TemporaryFolder folder;
  const auto told = [&] { return error_of([&] { read_log(folder.path()); }); };
  EXPECT_THAT(error_of([&] { read_log(folder / "nothing"); }), HasSubstr("nothing does not exist"));
  EXPECT_THAT(told(), HasSubstr("holds no log.jsonl"));
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"", "is empty"},
           {"{\"ev", "Line 1 of "},
           {step_line(1), "is not the configuration with which a log begins"},
           {R"({"event":"config","version":9})"
            "\n",
            "has no 'engine'"},
           {config_line() + "nonsense\n" + step_line(1), "Line 2 of "},
           {config_line() + "\xff\xfe\n" + step_line(1), "Line 2 of "},
           {config_line() + "[1]\n", "Line 2 of "},
           {config_line() + R"({"loss":1})"
                            "\n",
            "has neither 'event' nor 'step'"},
           {config_line() + R"({"step":1,"loss":"low"})"
                            "\n",
            "has a 'loss' that is no number"},
           {config_line() + R"({"event":"memory","per_rank":7})"
                            "\n",
            "has a 'per_rank' that is no list"},
           {config_line() + R"({"event":"traffic","steps":1,"per_rank":[7]})"
                            "\n",
            "is no object"}}) {
    folder.write("log.jsonl", text);
    EXPECT_THAT(told(), HasSubstr(says)) << text;
    EXPECT_THAT(told(), HasSubstr("log.jsonl"));
  }
}

}  // namespace
}  // namespace zero::report
