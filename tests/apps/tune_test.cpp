// `zero tune` as a user runs it: it finds a configuration that trains, goes on where it was
// stopped, and names what it cannot use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs `zero tune` with `more` options, behind the words of another program that runs it.
Outcome tune(const TrainFolder& folder, const std::vector<std::string>& more,
             std::vector<std::string> words = {}) {
  const std::vector<std::string> tuning{
      ZERO_PROGRAM, "tune",  "--model", folder.model(),  "--data", folder.text(), "--batch",
      "8",          "--seq", "32",      "--nproc",       "2",      "--tries",     "2",
      "--steps",    "3",     "--out",   folder / "tuned"};
  words.insert(words.end(), tuning.begin(), tuning.end());
  words.insert(words.end(), more.begin(), more.end());
  return run(words);
}

/// Returns `text` with the first `before` in it replaced, which must be there.
std::string replaced(std::string text, const std::string& before, const std::string& after) {
  const auto at = text.find(before);
  EXPECT_NE(at, std::string::npos) << before;
  return text.replace(at, before.size(), after);
}

TEST(Tune, FindsAConfigurationAndGoesOnWhereItWas) {
  const TrainFolder folder;
  write_file(folder / "other.json", R"({"gradient_clipping": 0.5})");
  const std::string hardware = folder / "here.json";
  write_file(hardware, R"({"device": "epyc 9654", "per_host": 2})");
  const std::vector<std::string> options{"--config", folder / "other.json", "--hardware", hardware};
  const auto outcome = tune(folder, options);
  ASSERT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("; its configuration is "));
  const auto config = Json::parse(read_file(folder / "tuned/ds_config.json"));
  EXPECT_EQ(config.at("train_batch_size"), 8);
  EXPECT_EQ(config.at("gradient_clipping"), 0.5);
  const auto table = Json::parse(read_file(folder / "tuned/tune.json"));
  EXPECT_GE(table.at("tries").size(), 2U);
  EXPECT_GT(table.at("tries").at(0).at("seconds").get<double>(), 0);
  EXPECT_GT(table.at("tries").at(0).at("predicted_seconds").get<double>(), 0);
  // A plan by the machine that the tries found predicts one of them as it was.
  const auto planned =
      run({ZERO_PROGRAM, "plan", "--model", folder.model(), "--batch", "8", "--seq", "32",
           "--dtype", "fp32", "--hardware", folder / "tuned/hardware.json", "--rows", "1000",
           "--json", folder / "plan.json"});
  ASSERT_EQ(planned.status, 0) << planned.err;
  double nearest = 1;
  const auto plan = Json::parse(read_file(folder / "plan.json"));
  for (const auto& each : plan.at("results")) {
    for (const auto& ran : table.at("tries")) {
      if (ran.at("configuration") != each.at("configuration")) continue;
      const double off =
          each.at("step_seconds").at("total").get<double>() / ran.at("seconds").get<double>() - 1;
      nearest = std::min(nearest, std::abs(off));
    }
  }
  EXPECT_LT(nearest, 0.02);
  const auto trained =
      folder.train({"--config", folder / "tuned/ds_config.json", "--micro-batch",
                    std::to_string(config.at("train_micro_batch_size_per_gpu").get<int>())});
  EXPECT_EQ(trained.status, 0) << trained.err;
  // The tries are known now, and none is made again.
  for (const auto& each : std::filesystem::directory_iterator(folder / "tuned")) {
    if (each.path().filename().string().starts_with("try-")) std::filesystem::remove(each);
  }
  const auto again = tune(folder, options);
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("which are not made again"));
  EXPECT_THAT(again.out, HasSubstr("; its configuration is "));
  EXPECT_FALSE(std::filesystem::exists(folder / "tuned/try-0.json"));
  EXPECT_EQ(Json::parse(read_file(folder / "tuned/tune.json")), table);
  // A change is named: that of an option, the machine, the model in its file, the text.
  const auto refused = [&](const std::vector<std::string>& more, const std::string& change) {
    const auto other = tune(folder, more);
    EXPECT_EQ(other.status, 2);
    EXPECT_THAT(other.err, AllOf(HasSubstr("is of another question"), HasSubstr(change)));
  };
  refused({"--hardware", hardware}, "config.gradient_clipping 0.5 -> (default)");
  refused({"--config", folder / "other.json"}, "-> \"measured\"");
  const auto model = read_file(folder.model()), text = read_file(folder.text());
  write_file(folder.model(), replaced(model, R"("n_layer": 2)", R"("n_layer": 6)"));
  refused(options, "model.n_layer 2 -> 6");
  write_file(folder.model(), model);
  write_file(folder.text(), "A" + text.substr(1));
  refused(options, "data ");
  write_file(folder.text(), text);
  // A damaged file is named, with what is wrong.
  const std::string file = folder / "tuned/tune.json";
  const auto whole = read_file(file);
  const std::vector<std::pair<std::string, std::string>> damages{
      {"", "tune.json is empty"},
      {whole.substr(0, whole.size() / 2), "ends too early"},
      {replaced(whole, R"("seconds": )", R"("seconds": -)"), "'tries[0].seconds'"},
      {replaced(whole, R"("candidates": [)", R"("candidates": [3,)"), "'candidates[0]'"},
      {replaced(whole, R"("machine")", R"("engine")"), "has no 'machine'"}};
  for (const auto& [damaged, words] : damages) {
    write_file(file, damaged);
    const auto outcome = tune(folder, options);
    EXPECT_EQ(outcome.status, 2) << words;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("tune.json"), HasSubstr(words), HasSubstr("--overwrite")));
  }
}

TEST(Tune, KeepsTheMeasuredMachineAndItsCandidates) {
  const TrainFolder folder;
  ASSERT_EQ(tune(folder, {}).status, 0);
  const auto read = [&] { return Json::parse(read_file(folder / "tuned/tune.json")); };
  const auto before = read();
  EXPECT_GT(before.at("candidates").size(), 2U);
  // More of the same candidates are tried: those that were tried are not measured or ranked anew.
  std::vector<std::string> words{
      ZERO_PROGRAM, "tune",  "--model", folder.model(),  "--data", folder.text(), "--batch",
      "8",          "--seq", "32",      "--nproc",       "2",      "--tries",     "3",
      "--steps",    "3",     "--out",   folder / "tuned"};
  const auto more = run(words);
  ASSERT_EQ(more.status, 0) << more.err;
  EXPECT_THAT(more.out, HasSubstr("which are not made again"));
  EXPECT_EQ(read().at("machine"), before.at("machine"));
  EXPECT_EQ(read().at("candidates"), before.at("candidates"));
  EXPECT_EQ(read().at("order").size(), 3U);
}

TEST(Tune, TakesItsTriesWithItWhenItIsKilled) {
  const TrainFolder folder;
  const std::string hardware = folder / "here.json";
  write_file(hardware, R"({"device": "epyc 9654", "per_host": 2})");
  Program program(
      {ZERO_PROGRAM, "tune",    "--model",    folder.model(), "--data", folder.text(),   "--batch",
       "8",          "--seq",   "32",         "--nproc",      "2",      "--tries",       "1",
       "--steps",    "1000000", "--hardware", hardware,       "--out",  folder / "tuned"});
  ASSERT_TRUE(program.wait_for_output("predicted ms"));
  std::vector<pid_t> processes;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (processes.size() < 3 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    processes = children_of(program.pid());
    if (!processes.empty()) {
      const auto ranks = children_of(processes.front());
      processes.insert(processes.end(), ranks.begin(), ranks.end());
    }
  }
  ASSERT_EQ(processes.size(), 3U);  // the try and its ranks
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait().status, 128 + SIGKILL);
  const auto runs = [](pid_t pid) {  // one that has ended may wait for its new parent
    const auto status = read_file("/proc/" + std::to_string(pid) + "/stat");
    return !status.empty() && status.find(") Z ") == std::string::npos;
  };
  while (std::ranges::any_of(processes, runs) && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(std::ranges::any_of(processes, runs));
}

TEST(Tune, KeepsFilesOfOthersAndMakesFailedTriesAgain) {
  const TrainFolder folder;
  const std::string hardware = folder / "here.json";
  write_file(hardware, R"({"device": "epyc 9654", "per_host": 2})");
  const std::string own = folder / "tuned/ds_config.json";
  const std::string text = R"({"activation_checkpointing": {"every": 1}})";
  std::filesystem::create_directories(folder / "tuned");
  write_file(own, text);
  const auto same = tune(folder, {"--config", own, "--hardware", hardware, "--overwrite"});
  EXPECT_EQ(same.status, 2);
  EXPECT_THAT(same.err, HasSubstr("would overwrite"));
  const auto other = tune(folder, {"--hardware", hardware});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.err, HasSubstr("no tuning has written it"));
  EXPECT_EQ(read_file(own), text);
  // Elsewhere it is the tuning's; candidates without recomputation switch it off.
  const std::string config = folder / "config.json";
  std::filesystem::rename(own, config);
  const std::vector<std::string> options{"--config", config, "--hardware", hardware};
  // The ranks cannot share memory: their error is shown, not that of their launcher.
  const auto limited = tune(folder, options, {"bash", "-c", R"(ulimit -f 100; exec "$0" "$@")"});
  EXPECT_EQ(limited.status, 1);
  EXPECT_THAT(limited.err,
              AllOf(HasSubstr("No candidate ran"), HasSubstr("raise that limit (ulimit -f)"),
                    HasSubstr("try-0.txt"), Not(HasSubstr("exited with status"))));
  const auto again = tune(folder, options);
  ASSERT_EQ(again.status, 0) << again.err;
  const auto table = Json::parse(read_file(folder / "tuned/tune.json"));
  for (const auto& each : table.at("tries")) EXPECT_FALSE(each.contains("failure"));
  const auto best = table.at("order").at(0).get<std::string>();
  EXPECT_EQ(Json::parse(read_file(own)).at("activation_checkpointing").at("every").get<int>(),
            best.find("recomputed") == std::string::npos ? 0 : 1);
  // Its content is the question, wherever the file lies.
  std::filesystem::copy_file(config, folder / "copy.json");
  EXPECT_EQ(tune(folder, {"--config", folder / "copy.json", "--hardware", hardware}).status, 0);
  write_file(config, R"({"gradient_clipping": 0.5})");
  EXPECT_THAT(tune(folder, options).err, HasSubstr("is of another question"));
}

TEST(Tune, NamesWhatItCannotUse) {
  const TrainFolder folder;
  const std::string hardware = folder / "here.json";
  write_file(hardware, R"({"device": "epyc 9654", "per_host": 2})");
  EXPECT_THAT(tune(folder, {"--vary", "colour"}).err, HasSubstr("colour"));
  EXPECT_THAT(tune(folder, {"--seq", "4096"}).err, HasSubstr("give it once"));
  const auto few = run({ZERO_PROGRAM, "tune", "--data", folder.text(), "--steps", "2"});
  EXPECT_EQ(few.status, 2);
  EXPECT_THAT(few.err, HasSubstr("at least 3 steps"));
  write_file(folder / "other.json", R"({"gradient_clipping": "much"})");
  const auto failed = tune(folder, {"--config", folder / "other.json", "--hardware", hardware});
  EXPECT_EQ(failed.status, 2);
  EXPECT_THAT(failed.err, HasSubstr("gradient_clipping"));
  EXPECT_FALSE(std::filesystem::exists(folder / "tuned/ds_config.json"));
}

}  // namespace
}  // namespace zero::test
