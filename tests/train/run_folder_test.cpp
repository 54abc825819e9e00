// Tests what a run finds and leaves in its folder.
#include "zero/train/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/support/message_of.h"
#include "tests/support/run_program.h"
#include "zero/base/error.h"

namespace zero::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

TEST(RunFolder, RemovesWhatAKilledRunLeftHalfWrittenAndNothingElse) {
  const test::TemporaryFolder folder;
  const std::set<std::string> kept{"checkpoint-8", "checkpoint-8.old", "model.safetensors",
                                   "model.safetensors.tmp", "notes.12.tmp"};
  for (const auto& name : kept) test::write_file(folder / name, "x");
  for (const char* name :
       {"checkpoint-8.earlier", "model.safetensors.123.tmp", "config.json.123.tmp"})
    test::write_file(folder / name, "x");
  fs::create_directory(folder / "checkpoint-8.partial");
  test::write_file(folder / "checkpoint-8.partial/rank-0-of-1.safetensors.9.tmp", "x");
  RunFolder(folder.path()).remove_left_overs();
  std::set<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder.path()))
    left.insert(entry.path().filename().string());
  EXPECT_EQ(left, kept);
}

TEST(RunFolder, PutsBackACheckpointWhoseReplacementWasCutShort) {
  const test::TemporaryFolder folder;
  const RunFolder run(folder.path());
  fs::create_directory(folder / "checkpoint-4.earlier");
  test::write_file(folder / "checkpoint-4.earlier/train.json", "{}");
  fs::create_directory(folder / "checkpoint-4.partial");
  run.remove_left_overs();
  EXPECT_EQ(run.last_checkpoint(), 4);
  EXPECT_FALSE(fs::exists(folder / "checkpoint-4.partial"));
}

TEST(RunFolder, RemovesItsOwnCheckpointsAlone) {
  const test::TemporaryFolder folder;
  const RunFolder run(folder.path());
  const auto put = [&](const std::string& checkpoint, const std::string& file) {
    fs::create_directory(folder / checkpoint);
    test::write_file(folder / checkpoint / file, R"({"format": "another"})");
  };
  put("checkpoint-1", "rank-0-of-2.safetensors");  // its marker went before
  put("checkpoint-2", "train.json");
  put("checkpoint-3", "model.safetensors");  // as transformers' Trainer names its folders
  put("checkpoint-4", "manifest.json");
  run.keep_checkpoints([](int64_t) { return false; });
  for (const int step : {1, 2, 3, 4}) EXPECT_EQ(fs::exists(run.checkpoint(step)), step > 2) << step;
}

TEST(RunFolder, WithCheckpointsAloneHoldsARun) {
  const test::TemporaryFolder folder;
  fs::create_directory(folder / "checkpoint-500");
  test::write_file(folder / "checkpoint-500/train.json", "{}");
  const RunFolder run(folder.path());
  EXPECT_THAT([&] { run.check(false, false); },
              ThrowsMessage<ConfigError>(HasSubstr("holds an earlier run")));
  run.check(true, false);
  run.check(false, true);
}

TEST(RunFolder, CutsTheLogBackToACheckpointsStep) {
  const test::TemporaryFolder folder;
  const RunFolder run(folder.path());
  const std::string kept =
      "{\"event\":\"config\"}\n{\"step\":1}\n{\"step\":2}\n"
      "{\"event\":\"validation\",\"step\":2}\na note of its reader\n";
  const auto cut = [&](const std::string& behind) {
    test::write_file(run.log(), kept + behind);
    run.cut_log(2);
    return test::read_file(run.log());
  };
  EXPECT_EQ(cut(""), kept);
  EXPECT_EQ(cut("{\"step\":3}\n{\"event\":\"memory\"}\n"), kept);
  EXPECT_EQ(cut("{\"event\":\"validation\",\"step\":4}\n"), kept);
  EXPECT_EQ(cut("{\"event\":\"end\",\"steps\":3}\n"), kept);
  EXPECT_EQ(cut("{\"event\":\"mem"), kept) << "a line that was cut off";
  const std::string whole = "{\"event\":\"end\",\"steps\":2}\n";
  EXPECT_EQ(cut(whole + "{\"step\":3"), kept + whole);
}

TEST(RunFolder, KeepsFilesThatNoRunWrote) {
  for (const std::string name :
       {"config.json", "model.safetensors", "model-00001-of-00002.safetensors", "labels.json",
        "adapter_config.json", "tokenizer.json", "jobs.txt", "log.jsonl", "merged/config.json",
        "merged/model.safetensors"}) {
    const test::TemporaryFolder folder;
    const RunFolder run(folder.path());
    fs::create_directory(run.merged());
    test::write_file(folder / "model-before.safetensors", "a copy of its owner's");
    EXPECT_NO_THROW(run.check(false, false));
    test::write_file(folder / name, "{}");
    for (const bool overwrite : {false, true}) {
      EXPECT_THAT(
          [&] { run.check(overwrite, false); },
          ThrowsMessage<ConfigError>(HasSubstr((folder / name).string() + " is in the way")));
    }
    test::write_file(run.log(), "{\"event\":\"config\"}\n");
    EXPECT_THAT([&] { run.check(false, false); },
                ThrowsMessage<ConfigError>(HasSubstr("holds an earlier run")));
    EXPECT_NO_THROW(run.check(true, false));
    const bool merged = name.starts_with("merged/");
    EXPECT_EQ(
        message_of<ConfigError>([&] { run.check(true, false, true); }) != "nothing was thrown",
        merged)
        << name;
  }
}

TEST(RunFolder, WhatCannotBeLookedAtIsAConfigurationError) {
  const test::TemporaryFolder folder;
  fs::create_symlink("loop", folder / "loop");
  const RunFolder run(folder / "loop/run");
  EXPECT_THROW(
      {
        run.check(false, false);
        run.make();
      },
      ConfigError);
}

}  // namespace
}  // namespace zero::train
