// `zero train --resume`: what it takes from the checkpoint, and what it says of the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainResume : public ::testing::Test {
 protected:
  /// A run of four steps with options that are nobody's defaults.
  void train_four_steps() { ASSERT_EQ(folder_.train(with_steps("4")).status, 0); }
  static std::vector<std::string> with_steps(const std::string& steps) {
    return {"--steps", steps,   "--save-every", "2", "--stage", "2",
            "--lr",    "0.004", "--accumulate", "2", "--dtype", "bf16"};
  }
  /// Nothing but `--resume` and what is given.
  Outcome resume(const std::vector<std::string>& more) {
    std::vector<std::string> words{ZERO_PROGRAM, "train", "--resume", "--out", folder_.out()};
    words.insert(words.end(), more.begin(), more.end());
    return test::run(words);
  }
  Json last_config() {
    Json config;
    for (const auto& line : folder_.log()) {
      if (line.value("event", "") == "config") config = line;
    }
    return config;
  }
  TrainFolder folder_;
};

TEST_F(TrainResume, TakesTheOptionsOfTheCheckpoint) {
  train_four_steps();
  ASSERT_EQ(folder_.train(with_steps("6"), "whole").status, 0);
  const auto outcome = resume({"--steps", "6"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.losses("whole").back(), folder_.losses().back());
  EXPECT_TRUE(folder_.weights("whole") == folder_.weights());
  const auto config = last_config();
  EXPECT_EQ(config["world_size"], 2);
  EXPECT_EQ(config["engine"]["zero_optimization"]["stage"], 2);
  EXPECT_EQ(config["train"]["data"], folder_.text());
  EXPECT_EQ(config["changes"], Json({"steps 4 -> 6"}));
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("resumed   at step 5\nchanged   steps 4 -> 6\n"),
                                 Not(HasSubstr("changed   optimizer"))));
}

TEST_F(TrainResume, TellsWhatTheCommandLineAndTheFileChange) {
  train_four_steps();
  const std::string file = folder_ / "more.json";
  write_file(file, R"({"gradient_clipping": 0.5, "train": {"steps": 9, "log_every": 3}})");
  const auto outcome = resume({"--steps", "6", "--lr", "0.002", "--config", file});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.steps().back()["lr"], 0.002);
  EXPECT_THAT(last_config()["changes"],
              ::testing::UnorderedElementsAre("steps 4 -> 6", "log_every 1 -> 3",
                                              "gradient_clipping 1.0 -> 0.5",
                                              "optimizer.params.lr 0.004 -> 0.002"));
  EXPECT_THAT(outcome.out, HasSubstr("changed   optimizer.params.lr 0.004 -> 0.002\n"));
}

TEST_F(TrainResume, RefusesAnotherModelByItsField) {
  train_four_steps();
  const std::string other = folder_ / "other.json";
  write_file(other, R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2,
      "n_positions": 64, "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
      "resid_pdrop": 0.0})");
  const auto weights = folder_.weights();
  auto outcome = resume({"--steps", "6", "--model", other});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("whose n_layer is 2"), HasSubstr("other.json is 3"),
                                 HasSubstr("Leave out --model")));
  outcome = resume({"--steps", "6", "--vocab-size", "300"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("whose vocab_size is 256"));
  EXPECT_EQ(folder_.steps().size(), 4u);
  EXPECT_TRUE(folder_.weights() == weights);
  // Dropout is no part of what was trained.
  outcome = resume({"--steps", "6", "--dropout", "0.1"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("changed   embd_pdrop 0.0 -> 0.1\n"));
}

TEST_F(TrainResume, TakesNoMoreOfASavedOptimizerOrBatchThanWhatIsNotReplaced) {
  train_four_steps();
  const std::string file = folder_ / "batch.json";
  write_file(file, R"({"train_batch_size": 4})");
  const auto outcome = resume({"--steps", "6", "--config", file});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(last_config()["tokens_per_step"], 4 * 32);
}

// A file of Hugging Face's trainer: what it leaves to the run is the checkpoint's.
TEST_F(TrainResume, WhatAFileLeavesToTheRunStaysAsItWasSaved) {
  const std::string file = folder_ / "auto.json";
  write_file(file, R"({"bf16": {"enabled": "auto"}, "train_batch_size": "auto",
      "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
      "gradient_clipping": null, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
      "scheduler": "auto"})");
  auto words = with_steps("4");
  words.insert(words.end(), {"--config", file, "--clip", "0.5"});
  ASSERT_EQ(folder_.train(words).status, 0);
  const auto before = last_config();
  const auto outcome = resume({"--steps", "6", "--config", file});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("changed   steps 4 -> 6\n"), Not(HasSubstr("dtype"))));
  EXPECT_EQ(last_config()["changes"].size(), 1);
  EXPECT_EQ(last_config()["engine"], before["engine"]);
}

}  // namespace
}  // namespace zero::test
