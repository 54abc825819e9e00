// `zero tune` as a user runs it: it finds a configuration that trains, goes on where it was
// stopped, and names what it cannot use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Outcome tune(const TrainFolder& folder, const std::vector<std::string>& more) {
  std::vector<std::string> words{
      ZERO_PROGRAM, "tune",  "--model", folder.model(),  "--data", folder.text(), "--batch",
      "8",          "--seq", "32",      "--nproc",       "2",      "--tries",     "2",
      "--steps",    "2",     "--out",   folder / "tuned"};
  words.insert(words.end(), more.begin(), more.end());
  return run(words);
}

TEST(Tune, FindsAConfigurationAndGoesOnWhereItWas) {
  const TrainFolder folder;
  write_file(folder / "other.json", R"({"gradient_clipping": 0.5})");
  const std::string hardware = folder / "here.json";
  write_file(hardware, R"({"device": "epyc 9654", "per_host": 2})");
  const std::vector<std::string> options{"--config", folder / "other.json", "--hardware", hardware};
  const auto outcome = tune(folder, options);
  ASSERT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("The fastest is "));
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
  // The tries are known now: the program that would make them is not needed.
  std::filesystem::remove(folder / "text.txt");
  const auto again = tune(folder, options);
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("which are not made again"));
  EXPECT_THAT(again.out, HasSubstr("The fastest is "));
  const auto other = tune(folder, {"--hardware", hardware});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.err, HasSubstr("is of another question"));
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
  std::filesystem::rename(folder.text(), folder / "away.txt");
  const std::vector<std::string> options{"--config", config, "--hardware", hardware};
  EXPECT_THAT(tune(folder, options).err, HasSubstr("No candidate ran"));
  std::filesystem::rename(folder / "away.txt", folder.text());
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
  write_file(folder / "other.json", R"({"gradient_clipping": "much"})");
  const auto failed = tune(folder, {"--config", folder / "other.json", "--hardware", hardware});
  EXPECT_EQ(failed.status, 2);
  EXPECT_THAT(failed.err, HasSubstr("gradient_clipping"));
  EXPECT_FALSE(std::filesystem::exists(folder / "tuned/ds_config.json"));
}

}  // namespace
}  // namespace zero::test
