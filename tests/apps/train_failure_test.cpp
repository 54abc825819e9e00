// `zero train` with what it cannot use: one clear error each, and nothing destroyed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

/// The message of a run that must fail with `status`, told once.
std::string error_of(const Outcome& outcome, int status) {
  EXPECT_EQ(outcome.status, status) << outcome.err;
  EXPECT_EQ(count(outcome.err, "zero: error: "), 1) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("frame #")), Not(HasSubstr("terminate"))));
  return outcome.err;
}

class TrainFailure : public ::testing::Test {
 protected:
  std::string error(const std::vector<std::string>& options, int status) {
    return error_of(folder_.train(options), status);
  }
  TrainFolder folder_;
};

TEST_F(TrainFailure, OptionsThatMakeNoSense) {
  EXPECT_THAT(error({"--stage", "4"}, 2), HasSubstr("--stage"));
  EXPECT_THAT(error({"--dtype", "fp8"}, 2),
              HasSubstr("--dtype is \"fp8\"; it must be fp32, bf16 or fp16. Did you mean"));
  EXPECT_THAT(error({"--offload-param", "disk"}, 2), HasSubstr("--offload-param is \"disk\""));
  EXPECT_THAT(error({"--nproc", "0"}, 2), HasSubstr("--nproc is 0"));
  EXPECT_THAT(error({"--steps", "many"}, 2), HasSubstr("--steps"));
  EXPECT_THAT(error({"--steps", "0"}, 2), HasSubstr("--steps is 0"));
  EXPECT_THAT(error({"--lr", "-1"}, 2), HasSubstr("--lr"));
  EXPECT_THAT(error({"--schedule", "cosin"}, 2), HasSubstr("Did you mean 'cosine'?"));
  EXPECT_THAT(error({"--model", "gpt2-nanno"}, 2), HasSubstr("Did you mean 'gpt2-nano'?"));
  EXPECT_THAT(error({"--model", "/no/such/model.json"}, 2), HasSubstr("/no/such/model.json"));
  EXPECT_THAT(error({"--seq", "65"}, 2), AllOf(HasSubstr("'seq' is 65"), HasSubstr("64")));
  EXPECT_THAT(error({"--vocab-size", "100"}, 2), HasSubstr("256"));
  std::filesystem::create_directory(folder_ / "small");
  write_file(folder_ / "small/config.json", R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 1,
      "n_head": 2, "n_positions": 64, "vocab_size": 200})");
  const std::string small = folder_ / "small";
  EXPECT_THAT(error({"--from", small}, 2),
              AllOf(HasSubstr("vocabulary of 256 tokens"),
                    HasSubstr("zero data prepare --tokenizer " + small)));
  EXPECT_THAT(error({"--from", small, "--vocab-size", "256"}, 2),
              AllOf(HasSubstr("--vocab-size is 256"), HasSubstr("200")));
  EXPECT_THAT(error({"--eval-batches", "2"}, 2), HasSubstr("--eval-tokens"));
  EXPECT_THAT(error({"surplus"}, 2), HasSubstr("'surplus'"));
  EXPECT_FALSE(std::filesystem::exists(folder_.out()));
}

TEST_F(TrainFailure, ConfigurationFiles) {
  const std::string file = folder_ / "bad.json";
  EXPECT_THAT(error({"--config", file}, 2), HasSubstr("bad.json"));
  write_file(file, "{");
  EXPECT_THAT(error({"--config", file}, 2), HasSubstr("bad.json"));
  write_file(file, R"({"train": {"stpes": 3}})");
  EXPECT_THAT(error({"--config", file}, 2), HasSubstr("Did you mean 'steps'?"));
  write_file(file, R"({"gradient_cliping": 1.0})");
  EXPECT_THAT(error({"--config", file}, 2), HasSubstr("gradient_clipping"));
  write_file(file, R"({"optimizer": {"type": "SGD"}})");
  EXPECT_THAT(error({"--config", file, "--beta1", "0.8"}, 2), HasSubstr("--beta1"));
}

TEST_F(TrainFailure, DataThatCannotBeUsed) {
  EXPECT_THAT(error({"--data", "/no/such/text"}, 1), HasSubstr("/no/such/text"));
  const std::string empty = folder_ / "empty.txt";
  write_file(empty, "");
  EXPECT_THAT(error({"--data", empty}, 1), HasSubstr("empty.txt"));
  const std::string small = folder_ / "small.txt";
  write_file(small, std::string(300, 'a'));
  EXPECT_THAT(error({"--data", small, "--nproc", "4", "--eval-tokens", "0"}, 1),
              HasSubstr("small.txt"));
  write_file(small, "ab");
  EXPECT_THAT(error({"--data", small}, 1), AllOf(HasSubstr("small.txt"), HasSubstr("validation")));

  // llm.c's header promises more tokens than there are.
  std::string header(1024, '\0');
  const int32_t magic = 20240520, version = 1, tokens = 5000;
  std::memcpy(header.data(), &magic, 4);
  std::memcpy(header.data() + 4, &version, 4);
  std::memcpy(header.data() + 8, &tokens, 4);
  const std::string truncated = folder_ / "truncated.bin";
  write_file(truncated, header + std::string(100, '\0'));
  EXPECT_THAT(error({"--data", truncated}, 1), HasSubstr("truncated.bin"));
  EXPECT_FALSE(std::filesystem::exists(folder_.out()));
}

TEST_F(TrainFailure, AnOutputFolderThatCannotServe) {
  const std::string file = folder_ / "file";
  write_file(file, "precious");
  EXPECT_THAT(error({"--out", file}, 2), AllOf(HasSubstr(file), HasSubstr("not a folder")));
  EXPECT_THAT(error({"--out", file + "/below"}, 2), HasSubstr("not a folder"));
  EXPECT_EQ(read_file(file), "precious");
  EXPECT_THAT(error({"--out", "/proc/zero"}, 2), HasSubstr("/proc"));
}

TEST_F(TrainFailure, AnEarlierRunIsKept) {
  ASSERT_EQ(folder_.train({"--steps", "2"}).status, 0);
  const auto log = read_file(folder_.out() / "log.jsonl");
  EXPECT_THAT(error({}, 2), AllOf(HasSubstr("holds an earlier run"), HasSubstr("--overwrite")));
  EXPECT_THAT(error({"--resume"}, 2), HasSubstr("no checkpoint"));
  // The data is checked although the checkpoint would name it.
  const auto bare = run({ZERO_PROGRAM, "train", "--resume", "--out", folder_ / "run"});
  EXPECT_EQ(bare.status, 2);
  EXPECT_THAT(bare.err, HasSubstr("holds no checkpoint to resume"));
  EXPECT_EQ(read_file(folder_.out() / "log.jsonl"), log);
  EXPECT_EQ(folder_.train({"--steps", "3", "--overwrite"}).status, 0);
  EXPECT_EQ(folder_.steps().size(), 3u);
}

TEST_F(TrainFailure, ACheckpointThatThisRunCannotGoOnFrom) {
  const std::vector<std::string> saving{"--stage", "2", "--steps", "4", "--save-every", "2"};
  ASSERT_EQ(folder_.train(saving).status, 0);
  EXPECT_THAT(error({"--resume", "--stage", "2", "--steps", "4"}, 2),
              HasSubstr("has already done 4 steps; --steps is 4."));
  EXPECT_EQ(folder_.train({"--resume", "--stage", "2", "--steps", "8"}).status, 0);
}

TEST_F(TrainFailure, ALogOnAFullDisk) {
  std::filesystem::create_directory(folder_.out());
  std::filesystem::create_symlink("/dev/full", folder_.out() / "log.jsonl");
  EXPECT_THAT(error_of(folder_.train({"--overwrite", "--nproc", "1"}), 1),
              AllOf(HasSubstr("log.jsonl"), HasSubstr("No space left")));
  // The rank that met the full disk tells, and the launcher names it.
  const auto outcome = folder_.train({"--overwrite", "--nproc", "3"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("[0] zero: error: Cannot write the log"),
                    HasSubstr("zero: error: rank 0 (pid "), Not(HasSubstr("[1] zero: error")),
                    Not(HasSubstr("[2] zero: error"))));
}

TEST_F(TrainFailure, WeightsOnAFullDisk) {
  // A limit on the size of files stands for the disk: the log fits, the weights do not.
  auto command = folder_.command({"--nproc", "1", "--steps", "2"});
  std::string line = "ulimit -f 32; exec";  // blocks of 512 bytes
  for (const auto& word : command) line += " '" + word + "'";
  const auto outcome = test::run({"/bin/sh", "-c", line});
  EXPECT_THAT(error_of(outcome, 1), HasSubstr("model.safetensors"));
  EXPECT_EQ(folder_.weights(), "");
  EXPECT_EQ(folder_.steps().size(), 2u) << "the log is kept";
  for (const auto& entry : std::filesystem::directory_iterator(folder_.out())) {
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("tmp")))
        << "nothing half-written is left";
  }
}

TEST_F(TrainFailure, ALossThatIsNotFinite) {
  const auto outcome = folder_.train({"--lr", "1e36", "--clip", "0", "--steps", "50"});
  EXPECT_EQ(outcome.status, 1);
  const auto steps = folder_.steps();
  ASSERT_FALSE(steps.empty());
  EXPECT_TRUE(steps.back()["loss"].is_null());
  EXPECT_LT(steps.size(), 50u);
  EXPECT_THAT(outcome.err, HasSubstr("The loss of step " + std::to_string(steps.size()) + " is "));
  EXPECT_EQ(count(outcome.err, "The loss of step"), 1);
  EXPECT_THAT(outcome.err, HasSubstr("nothing was updated in it"));
  const auto in_backward = folder_.train(
      {"--lr", "1e36", "--clip", "0", "--update-in-backward", "--stage", "2"}, "in-backward");
  EXPECT_EQ(in_backward.status, 1);
  EXPECT_THAT(in_backward.err, HasSubstr("update_in_backward may have updated weights"));
}

}  // namespace
}  // namespace zero::test
