// `zero train --resume`: what it takes from the checkpoint, and what it says of the rest.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>

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
  static std::vector<std::string> with_steps(const std::string& steps,
                                             const std::string& save_every = "2") {
    return {"--steps", steps,   "--save-every", save_every, "--stage", "2",
            "--lr",    "0.004", "--accumulate", "2",        "--dtype", "bf16"};
  }
  /// Nothing but `--resume`, its value perhaps, and what is given.
  Outcome resume(const std::vector<std::string>& more) {
    std::vector<std::string> words{ZERO_PROGRAM, "train", "--out", folder_.out(), "--resume"};
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
  const auto outcome =
      resume({"--steps", "6", "--lr", "0.002", "--config", file, "--optimizer", "adamw:eps=1e-7"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.steps().back()["lr"], 0.002);
  EXPECT_THAT(last_config()["changes"],
              ::testing::UnorderedElementsAre(
                  "steps 4 -> 6", "log_every 1 -> 3", "gradient_clipping 1.0 -> 0.5",
                  "optimizer.params.eps 1e-08 -> 1e-07", "optimizer.params.lr 0.004 -> 0.002"));
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

// --- A run that dies and is started again

TEST_F(TrainResume, ARankThatIsKilledCostsNoBit) {
  const auto words = [&](const std::string& run) {
    auto all = with_steps("40", "3");
    all.insert(all.end(), {"--dropout", "0.1", "--out", folder_.out(run)});
    return all;
  };
  ASSERT_EQ(folder_.train(words("whole"), "whole").status, 0);
  Program job(folder_.elastic("2", {}, words("run")));
  ASSERT_TRUE(folder_.wait_for_step(7));
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGKILL);
  const auto outcome = job.wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 1"), HasSubstr("was killed by signal 9 (SIGKILL)"),
                                 HasSubstr("zero: restart 1 of 2 with 2 ranks")));
  EXPECT_THAT(outcome.out, HasSubstr("resumed   at step "));
  EXPECT_EQ(folder_.losses("whole"), folder_.losses());
  EXPECT_TRUE(folder_.weights("whole") == folder_.weights());
}

TEST_F(TrainResume, TheRanksThatAreLeftKeepTheGlobalBatch) {
  // With a checkpoint to go on from, and with none.
  for (const auto& [every, step] : {std::pair{"3", 7}, {"1000", 2}}) {
    const std::string run = std::string("every") + every;
    auto words = with_steps("40", every);
    words.insert(words.end(), {"--out", folder_.out(run)});
    Program job(folder_.elastic("2", {"--min-ranks", "1"}, words));
    ASSERT_TRUE(folder_.wait_for_step(step, run));
    kill(children_of(job.pid()).at(0), SIGKILL);
    const auto outcome = job.wait();
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    if (step == 7) {
      EXPECT_THAT(outcome.out, HasSubstr("changed   ranks 2 -> 1"));
    }
    EXPECT_THAT(outcome.out,
                HasSubstr("512 tokens (ranks 1 x micro-batches 4 x sequences 4 x 32)"));
    EXPECT_EQ(folder_.steps(run).size(), 40u);
  }
}

// The micro-batches of the checkpoint, which the command line does not repeat, are those of two
// ranks.
TEST_F(TrainResume, TheRanksThatAreLeftKeepTheGlobalBatchOfAResumedRun) {
  train_four_steps();
  Program job({ZERO_PROGRAM, "launch", "-n", "2", "--max-restarts", "2", "--min-ranks", "1", "--",
               ZERO_PROGRAM, "train", "--out", folder_.out(), "--resume", "--steps", "40",
               "--micro-batch", "4"});
  ASSERT_TRUE(folder_.wait_for_step(9));
  kill(children_of(job.pid()).at(0), SIGKILL);
  const auto outcome = job.wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("512 tokens (ranks 2 x micro-batches 2 x sequences 4 x 32)"),
                    HasSubstr("512 tokens (ranks 1 x micro-batches 4 x sequences 4 x 32)")));
}

TEST_F(TrainResume, AJobThatIsStartedAgainGoesOnWithItsOwnRunAndNoOther) {
  train_four_steps();
  const auto again = [&](const std::string& job, const std::vector<std::string>& more) {
    auto words = with_steps("6");
    words.insert(words.end(), more.begin(), more.end());
    return test::run(folder_.command(words), {{"SLURM_JOB_ID", job}, {"SLURM_RESTART_COUNT", "1"}});
  };
  // The job's first attempt came to nothing, and the folder has somebody else's run.
  auto outcome = again("7", {});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("holds an earlier run"));
  outcome = again("7", {"--resume", "4"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("resumed   at step 5\n"));
  // Now it is the job's, whatever else the options say.
  for (const auto& more : {std::vector<std::string>{"--overwrite"}, {"--resume", "4"}}) {
    outcome = again("7", more);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(folder_.steps().size(), 6u);
    EXPECT_THAT(outcome.out, Not(HasSubstr("resumed   at step 5")));
  }
  outcome = again("8", {"--overwrite"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, Not(HasSubstr("resumed")));
  EXPECT_EQ(folder_.steps().size(), 6u);
}

TEST_F(TrainResume, AFullDiskCostsTheSavesAndNotTheRun) {
  auto words = with_steps("6");
  words.insert(words.end(), {"--nproc", "1"});
  ASSERT_EQ(folder_.train(words, "whole").status, 0);
  // The weights fit into a file, and a checkpoint does not.
  const auto weights = folder_.weights("whole");
  std::string line = fmt::format("ulimit -f {}; exec", weights.size() * 5 / 4 / 512);
  for (const auto& word : folder_.command(words)) line += " '" + word + "'";
  const auto outcome = test::run({"sh", "-c", line});
  EXPECT_EQ(outcome.status, 1) << "the last save failed";
  EXPECT_THAT(outcome.err, HasSubstr("File too large"));
  EXPECT_EQ(folder_.losses(), folder_.losses("whole"));
  EXPECT_TRUE(folder_.weights() == weights);
  // To start the job again would train all steps once more.
  auto again = words;
  again.emplace_back("--overwrite");
  const auto restarted =
      test::run(folder_.command(again), {{"SLURM_JOB_ID", "7"}, {"SLURM_RESTART_COUNT", "0"}});
  EXPECT_EQ(restarted.status, 0) << restarted.err;
  for (int64_t step = 1; step <= 6; ++step)
    std::filesystem::remove_all(folder_.out() / fmt::format("checkpoint-{}", step));
  const auto refused =
      test::run(folder_.command(again), {{"SLURM_JOB_ID", "7"}, {"SLURM_RESTART_COUNT", "1"}});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("has trained to the end"));
}

TEST_F(TrainResume, KeepsTheBestCheckpoint) {
  const auto begun =
      folder_.train({"--steps", "4", "--save-every", "2", "--eval-every", "2", "--keep-best"});
  ASSERT_EQ(begun.status, 0) << begun.err;
  const auto outcome = resume({"--steps", "8", "--lr", "100"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::pair<double, int64_t> best{1e9, 0};
  for (const auto& line : folder_.log()) {
    if (line.value("event", "") == "validation")
      best = std::min(best, {line["loss"].get<double>(), line["step"].get<int64_t>()});
  }
  ASSERT_LT(best.second, 8) << "such a rate does harm";
  for (int64_t step = 2; step <= 8; step += 2) {
    EXPECT_EQ(std::filesystem::exists(folder_.out() / fmt::format("checkpoint-{}", step)),
              step == best.second || step == 8);
  }
  const auto run = folder_.out();
  ASSERT_EQ(test::run({ZERO_PROGRAM, "ckpt", "prune", run, "--keep-best"}).status, 0);
  EXPECT_TRUE(std::filesystem::exists(run / fmt::format("checkpoint-{}", best.second)));
  EXPECT_EQ(
      folder_.train({"--keep-best", "--save-every", "3", "--eval-every", "2"}, "other").status, 2);
}

TEST_F(TrainResume, AutoBeginsWhereThereIsNoCheckpoint) {
  auto words = with_steps("4");
  words.insert(words.end(), {"--resume", "auto"});
  auto outcome = folder_.train(words);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.steps().size(), 4u);
  // The run is complete: nothing is left but to write its weights again.
  const auto weights = folder_.weights();
  outcome = folder_.train(words);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(folder_.weights() == weights);
  // A run without checkpoints is not taken for an attempt of this one.
  ASSERT_EQ(folder_.train({"--steps", "2"}, "other").status, 0);
  words.insert(words.end(), {"--out", folder_.out("other")});
  outcome = folder_.train(words);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("holds an earlier run"));
}

TEST_F(TrainResume, StopsBeforeATimeLimitWithACheckpoint) {
  auto words = with_steps("1000000");
  words.insert(words.end(), {"--stop-after", "1s", "--eval-tokens", "0"});
  auto outcome = folder_.train(words);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("stopped by --stop-after 1s after step "));
  const auto last = folder_.steps().back()["step"].get<int64_t>();
  EXPECT_TRUE(std::filesystem::exists(folder_.out() / fmt::format("checkpoint-{}", last)));
  outcome = resume({"--steps", std::to_string(last + 1)});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.train({"--stop-after", "soon"}, "other").status, 2);
}

TEST_F(TrainResume, SaysHowLongASaveHasHeldTheRun) {
  train_four_steps();
  const auto saves = [&] {
    std::vector<Json> found;
    for (const auto& line : folder_.log()) {
      if (line.value("event", "") == "save") found.push_back(line);
    }
    return found;
  }();
  ASSERT_EQ(saves.size(), 2u);
  EXPECT_EQ(saves[0]["step"], 2);
  EXPECT_GT(saves[0]["bytes"], 0);
  EXPECT_LE(saves[0]["held_ms"].get<double>(), saves[0]["seconds"].get<double>() * 1000);
}

// --- Which checkpoint, and where

void flip_a_byte(const std::filesystem::path& file) {
  auto bytes = read_file(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_file(file, bytes);
}

TEST_F(TrainResume, TakesTheNewestCheckpointThatIsSoundAndNamesTheOthers) {
  auto words = with_steps("6");
  words.insert(words.end(), {"--keep-last", "3"});
  ASSERT_EQ(folder_.train(words).status, 0);
  const auto losses = folder_.losses();
  const auto weights = folder_.weights();
  flip_a_byte(folder_.out() / "checkpoint-6/rank-1-of-2.safetensors");
  flip_a_byte(folder_.out() / "checkpoint-4/manifest.json");
  const auto checked = test::run({ZERO_PROGRAM, "ckpt", "verify", folder_.out() / "checkpoint-6"});
  EXPECT_EQ(checked.status, 1);
  EXPECT_THAT(checked.err, HasSubstr("rank-1-of-2.safetensors' is damaged: bytes 0 to"));
  // Asked for, it is taken or refused.
  auto outcome = resume({"6", "--steps", "7"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("rank-1-of-2.safetensors' is damaged"));
  outcome = resume({"--steps", "6"});
  EXPECT_EQ(outcome.status, 2) << "the manifest of step 6 is sound, and there is no step left";
  // From step 2 on it does again what it did.
  std::filesystem::remove(folder_.out() / "checkpoint-6/rank-1-of-2.safetensors");
  outcome = resume({"--steps", "6"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("damaged   "), HasSubstr("checkpoint-6/rank-1-of-2.safetensors"),
                    HasSubstr("checkpoint-4/manifest.json' is damaged"),
                    HasSubstr("resumed   at step 3\n")));
  EXPECT_EQ(folder_.losses(), losses);
  EXPECT_TRUE(folder_.weights() == weights);
  EXPECT_EQ(test::run({ZERO_PROGRAM, "ckpt", "verify", folder_.out() / "checkpoint-6"}).status, 0);
}

TEST_F(TrainResume, ChecksEveryByteBeforeItIsUsed) {
  auto words = with_steps("6");
  words.insert(words.end(), {"--keep-last", "3"});
  ASSERT_EQ(folder_.train(words).status, 0);
  ASSERT_EQ(folder_.train(with_steps("8"), "whole").status, 0);
  flip_a_byte(folder_.out() / "checkpoint-6/rank-0-of-2.safetensors");
  const auto outcome = resume({"--steps", "8"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("checkpoint-6/rank-0-of-2.safetensors' is damaged"),
                                 HasSubstr("resumed   at step 5\n")));
  EXPECT_EQ(folder_.losses(), folder_.losses("whole"));
  EXPECT_TRUE(folder_.weights() == folder_.weights("whole"));
}

TEST_F(TrainResume, GoesOnFromAStepOrAFolder) {
  auto words = with_steps("6");
  words.insert(words.end(), {"--keep-last", "3"});
  ASSERT_EQ(folder_.train(words).status, 0);
  const auto losses = folder_.losses();
  const auto from = folder_.out() / "checkpoint-4";
  // In a folder of its own: the steps behind the checkpoint.
  auto outcome = test::run(
      {ZERO_PROGRAM, "train", "--resume", from, "--out", folder_.out("other"), "--steps", "6"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.losses("other"), (std::vector<float>{losses[4], losses[5]}));
  EXPECT_TRUE(folder_.weights("other") == folder_.weights());
  EXPECT_EQ(folder_.losses(), losses);
  outcome = resume({"2", "--steps", "3"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder_.losses(), std::vector<float>(losses.begin(), losses.begin() + 3));
  EXPECT_FALSE(std::filesystem::exists(from)) << "it was of steps that are gone";
  outcome = resume({"5", "--steps", "6"});
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.err, HasSubstr("checkpoint-5 has no manifest.json"));
}

TEST_F(TrainResume, KeepsTheSamplesOfAStepAtOtherRanksAndStages) {
  std::string numbers;
  for (int i = 0; numbers.size() < 20000; ++i) numbers += fmt::format("{} ", i * 7919);
  const std::string other = folder_ / "numbers.txt";
  write_file(other, numbers);
  const auto mixed = [&](const std::string& steps) {
    auto words = with_steps(steps);
    words.insert(words.end(), {"--data", folder_.text(), "--data", other, "--data-weights", "3,5"});
    return words;
  };
  ASSERT_EQ(folder_.train(mixed("4")).status, 0);
  ASSERT_EQ(folder_.train(mixed("8"), "whole").status, 0);
  const auto expected = folder_.losses("whole");
  std::filesystem::copy(folder_.out(), folder_.out("one"),
                        std::filesystem::copy_options::recursive);
  const auto outcome = test::run({ZERO_PROGRAM, "train", "--resume", "--out", folder_.out("one"),
                                  "--nproc", "1", "--stage", "0", "--steps", "8"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("changed   ranks 2 -> 1\n"));
  const auto found = folder_.losses("one");
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    // Other samples would be far away.
    EXPECT_NEAR(found[i], expected[i], i < 4 ? 0 : 2e-2) << "step " << i + 1;
  }
  EXPECT_EQ(last_config()["train"]["data"], Json({folder_.text(), other}));
  EXPECT_EQ(last_config()["train"]["data_weights"], Json({3.0, 5.0}));
  const auto weighted = resume({"--steps", "8", "--data-weights", "1,1"});
  EXPECT_EQ(weighted.status, 1);
  EXPECT_THAT(weighted.err, HasSubstr("shares of 4096 samples (by --data-weights) 1536, 2560, and "
                                      "this one has 2048, 2048"));
  auto swapped = with_steps("8");
  std::string reversed(numbers.rbegin(), numbers.rend());
  write_file(folder_ / "reversed.txt", reversed);
  swapped.insert(swapped.end(), {"--resume", "--data", folder_.text(), "--data",
                                 folder_ / "reversed.txt", "--data-weights", "3, 5"});
  const auto others = folder_.train(swapped);
  EXPECT_EQ(others.status, 1);
  EXPECT_THAT(others.err, HasSubstr("The run that is resumed had other data"));
  // Four ranks share the two micro-batches of two ranks.
  EXPECT_EQ(resume({"--nproc", "4", "--stage", "3", "--steps", "6"}).status, 0);
  // Three ranks cannot.
  const auto refused = resume({"--nproc", "3", "--steps", "8"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("4 ranks with 1 micro-batches"), HasSubstr("3 ranks"),
                                 HasSubstr("--accumulate")));
}

TEST_F(TrainResume, KeepsAsManyCheckpointsAsItIsTold) {
  ASSERT_EQ(
      folder_.train({"--steps", "7", "--save-every", "1", "--keep-last", "2", "--keep-every", "3"})
          .status,
      0);
  const auto kept = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.out())) {
      if (entry.is_directory()) names.insert(entry.path().filename());
    }
    return names;
  };
  EXPECT_EQ(kept(), (std::set<std::string>{"checkpoint-3", "checkpoint-6", "checkpoint-7"}));
  const auto shown = test::run({ZERO_PROGRAM, "ckpt", "inspect", folder_.out() / "checkpoint-7"});
  EXPECT_EQ(shown.status, 0) << shown.err;
  EXPECT_THAT(shown.out, AllOf(HasSubstr("checkpoint-7: step 7, by libzero"),
                               HasSubstr("on 2 ranks"), HasSubstr("attached: train")));
  EXPECT_EQ(test::run({ZERO_PROGRAM, "ckpt", "prune", folder_.out(), "--keep-last", "1"}).status,
            0);
  EXPECT_EQ(kept(), std::set<std::string>{"checkpoint-7"});
}

}  // namespace
}  // namespace zero::test
