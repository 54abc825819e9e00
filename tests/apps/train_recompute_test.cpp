// `zero train` with recomputation, ranks as processes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::HasSubstr;

TEST(TrainRecompute, GivesTheSameBitsAtEveryStageWithDropout) {
  const TrainFolder folder;
  for (const std::string dtype : {"fp32", "bf16"}) {
    const auto train = [&](const std::string& stage, const std::string& every) {
      auto run = fmt::format("{}{}{}", stage, dtype, every);
      const auto outcome = folder.train(
          {"--stage", stage, "--dtype", dtype, "--dropout", "0.1", "--recompute", every}, run);
      EXPECT_EQ(outcome.status, 0) << outcome.err;
      return run;
    };
    const auto reference = train("0", "0");
    for (const auto* stage : {"0", "1", "2", "3"}) {
      const auto run = train(stage, stage == std::string("1") ? "2" : "1");
      EXPECT_EQ(folder.losses(run), folder.losses(reference)) << run;
      EXPECT_TRUE(folder.weights(run) == folder.weights(reference)) << run;
    }
    EXPECT_FALSE(folder.event("config", reference)["engine"].contains("activation_checkpointing"));
    EXPECT_EQ(
        folder.event("config", "3" + dtype + "1")["engine"]["activation_checkpointing"]["every"],
        1);
  }
}

TEST(TrainRecompute, KeepsActivationsInABufferOrInFilesAsTheConfigurationSays) {
  const TrainFolder folder;
  const std::string disk = (folder / "disk").string();
  std::filesystem::create_directory(disk);
  const auto train = [&](const std::string& name, const Json& section) {
    const Json config{{"zero_optimization", {{"stage", 2}}},
                      {"activation_checkpointing", section},
                      {"train", {{"dropout", 0.1}}}};
    write_file(folder / (name + ".json"), config.dump());
    const auto outcome = folder.train({"--config", folder / (name + ".json")}, name);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  };
  train("none", Json::object());
  train("buffer", {{"every", 1}, {"contiguous_memory_optimization", true}});
  train("files", {{"every", 1}, {"nvme", true}, {"nvme_path", disk}});
  for (const auto* run : {"buffer", "files"}) {
    EXPECT_EQ(folder.losses(run), folder.losses("none")) << run;
    EXPECT_TRUE(folder.weights(run) == folder.weights("none")) << run;
  }
  EXPECT_EQ(folder.event("config", "files")["engine"]["activation_checkpointing"]["nvme_path"],
            disk);
  EXPECT_TRUE(std::filesystem::is_empty(disk));

  write_file(
      folder / "nowhere.json",
      R"({"activation_checkpointing": {"every": 1, "nvme": true, "nvme_path": "/nowhere"}})");
  const auto outcome = folder.train({"--config", folder / "nowhere.json"}, "nowhere");
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.err, HasSubstr("/nowhere"));
}

TEST(TrainLayerMajor, GivesTheSameLossesUpToRounding) {
  const TrainFolder folder;
  const auto train = [&](const std::string& run, std::vector<std::string> more) {
    more.insert(more.end(), {"--accumulate", "3", "--log-every", "1"});
    const auto outcome = folder.train(more, run);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return folder.losses(run);
  };
  const auto expected = train("plain", {"--stage", "1"});
  for (const std::string stage : {"0", "1", "2", "3"}) {
    const auto losses = train("layers" + stage, {"--stage", stage, "--layer-major"});
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4);
    EXPECT_EQ(losses, train("again" + stage, {"--stage", stage, "--layer-major"}));
  }
  EXPECT_TRUE(folder.event("config", "layers3")["engine"]["layer_major_accumulation"]);
}

}  // namespace
}  // namespace zero::test
