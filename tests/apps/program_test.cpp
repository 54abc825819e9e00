// The program's manners.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Outcome zero_program(const std::vector<std::string>& arguments) {
  std::vector<std::string> command{ZERO_PROGRAM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run(command);
}

TEST(Program, ListsItsSubcommands) {
  for (const auto& arguments : {std::vector<std::string>{"--help"}, {"help"}, {"-h"}}) {
    const auto outcome = zero_program(arguments);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("train "), HasSubstr("launch "), HasSubstr("data ")));
  }
  const auto nothing = zero_program({});
  EXPECT_EQ(nothing.status, 2);
  EXPECT_THAT(nothing.out, HasSubstr("usage"));
}

TEST(Program, HelpsWithEachSubcommand) {
  EXPECT_THAT(zero_program({"help", "launch"}).out, HasSubstr("--log-dir"));
  EXPECT_THAT(zero_program({"data", "prepare", "--help"}).out, HasSubstr("--tokenizer"));
  const auto train = zero_program({"help", "train"});
  EXPECT_EQ(train.status, 0);
  for (const char* option :
       {"--model", "--data", "--out", "--nproc", "--stage", "--dtype", "--micro-batch", "--seq",
        "--accumulate", "--steps", "--lr", "--clip", "--seed", "--threads", "--config"}) {
    EXPECT_THAT(train.out, HasSubstr(option));
  }
  EXPECT_EQ(zero_program({"train", "--help"}).out, train.out);
}

TEST(Program, SaysItsVersion) {
  EXPECT_THAT(zero_program({"--version"}).out, HasSubstr("zero 0."));
}

TEST(Program, NamesTheNearestSubcommand) {
  const auto outcome = zero_program({"trian"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              HasSubstr("zero: error: 'trian' is not a subcommand. Did you mean 'train'?"));
}

TEST(Program, NamesTheNearestOption) {
  const auto outcome = zero_program({"train", "--micro-bacth", "3"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("'--micro-bacth'"), HasSubstr("Did you mean '--micro-batch'?")));
  EXPECT_THAT(zero_program({"train", "--stpes=3"}).err, HasSubstr("Did you mean '--steps'?"));
}

TEST(Program, ChecksAConfigurationAndShowsWhatIsInForce) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.json";
  write_file(file, R"({"train_batch_size": 12, "zero_optimization": {"stage": 2},
                       "train": {"min_lr": 1e-5}})");
  const auto outcome = zero_program({"config", file, "--nproc", "3"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto settings = nlohmann::json::parse(outcome.out, nullptr, true, true);
  EXPECT_EQ(settings["train_micro_batch_size_per_gpu"], 4);
  EXPECT_EQ(settings["zero_optimization"]["stage"], 2);
  EXPECT_EQ(settings["train"]["min_lr"], 1e-5);
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("\"stage\": 2,  // file\n"),
            HasSubstr("\"train_micro_batch_size_per_gpu\": 4,  // file, by train_batch_size"),
            HasSubstr("\"gradient_clipping\": 1.0,  // default\n")));
  // What is printed is a configuration.
  write_file(folder / "again.json", outcome.out);
  EXPECT_THAT(zero_program({"config", folder / "again.json", "-n", "3", "--clip", "0.5", "--lr",
                            "0.25", "--scheduler", "WarmupLR:warmup_num_steps=7"})
                  .out,
              AllOf(HasSubstr("\"gradient_clipping\": 0.5,  // command line\n"),
                    HasSubstr("\"lr\": 0.25,  // command line\n"),
                    HasSubstr("\"warmup_num_steps\": 7,  // command line\n"),
                    HasSubstr("\"stage\": 2,  // file\n")));
  const auto refused = zero_program({"config", file, "--nproc", "5"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("ds.json"), HasSubstr("train_batch_size is 12")));
  EXPECT_THAT(zero_program({"config", "--markdown"}).out,
              HasSubstr("| `zero_optimization.stage` | 0, 1, 2 or 3 | 0 | `--stage` |"));
}

TEST(Program, TellsWhatOfAFileActs) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.json";
  write_file(file, R"({"train_batch_size": 6, "comet": {"enabled": true},
      "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}},
      "nebula": {"enabled": false}, "zero_optimization": {"overlap_comm": true, "stgae": 1}})");
  const auto outcome = zero_program({"config", "--check", file, "-n", "3"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("acts\n  train_batch_size\n"),
            HasSubstr("it is so anyway, or the default\n  zero_optimization.overlap_comm\n"),
            HasSubstr("switched off\n  nebula\n"), HasSubstr("has no effect here\n  comet: "),
            HasSubstr("refused\n  Unknown key 'zero_optimization.stgae' in the "
                      "configuration. Did you mean 'stage'?\n"),
            HasSubstr("compression_training.weight_quantization.shared_parameters: ")));
  const auto lenient = zero_program({"config", "--check", "--lenient", file, "-n", "3"});
  EXPECT_EQ(lenient.status, 0) << lenient.out;
  EXPECT_THAT(zero_program({"config", file, "-n", "3", "--lenient"}).err,
              HasSubstr("zero: warning: " + file + ": these keys have no effect here:\n"));
  EXPECT_EQ(zero_program({"config", file, "-n", "3"}).status, 2);
}

TEST(Program, TheCommandLineComesBeforeTheFile) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.json";
  write_file(file, R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16,
      "gradient_accumulation_steps": 4, "bf16": {"enabled": "auto", "bf16_optimizer_states": true,
      "bf16_master_weights_and_grads": true}, "data_types": {"grad_accum_dtype": "bf16"}})");
  EXPECT_EQ(zero_program({"config", file, "-n", "2"}).status, 2);
  const std::vector<std::string> right{"-n", "2", "--accumulate", "2", "--dtype", "bf16"};
  for (const char* check : {"", "--check"}) {
    std::vector<std::string> words{"config", file};
    words.insert(words.end(), right.begin(), right.end());
    if (*check != 0) words.emplace_back(check);
    const auto outcome = zero_program(words);
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  }
}

TEST(Program, AnOptionHidesNoMistakeOfTheFile) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.json";
  for (const char* text : {"[]", R"({"zero_optimization": "stage3"})"}) {
    write_file(file, text);
    const auto outcome = zero_program({"config", file, "--stage", "2"});
    EXPECT_EQ(outcome.status, 2) << text;
    EXPECT_THAT(outcome.err, HasSubstr("must be an object")) << text;
  }
}

TEST(Program, ExplainsAKey) {
  EXPECT_THAT(zero_program({"config", "--explain", "zero_optimization.stage"}).out,
              AllOf(HasSubstr("ZeRO stage: 0 shards nothing"), HasSubstr("default  0"),
                    HasSubstr("option   --stage"), HasSubstr("cost     Stages 0 to 2 send")));
  const auto again = zero_program({"config", "--explain", "max_live_parameters"});
  EXPECT_THAT(again.out, HasSubstr("zero_optimization.stage3_max_live_parameters\n"));
  EXPECT_THAT(zero_program({"config", "--explain", "comet.enabled"}).out,
              HasSubstr("effect   Has no effect here."));
  EXPECT_THAT(zero_program({"config", "--explain", "zero_hpz_partition_size"}).out,
              HasSubstr("cost     Parameters of 1 / (ranks of a host)"));
  EXPECT_THAT(zero_program({"config", "--explain", "bf16.enabled"}).out,
              testing::Not(HasSubstr("nothing to speak of")));
  for (const char* key : {"train_batch_size", "muon_lr"})
    EXPECT_THAT(zero_program({"config", "--explain", key}).out,
                testing::Not(HasSubstr("Has no effect")))
        << key;
  EXPECT_THAT(zero_program({"config", "--explain", "cycle_max_mom"}).out,
              HasSubstr("scheduler.params.cycle_max_mom of OneCycle\n"));
  const auto unknown = zero_program({"config", "--explain", "overlap_com"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.err, HasSubstr("Did you mean 'overlap_comm'?"));
}

TEST(Program, PreparesDataByBytes) {
  TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 500; ++i) text += "some text to learn\n";
  write_file(folder / "in.txt", text);
  const auto outcome = zero_program(
      {"data", "prepare", folder / "in.txt", "--out", folder / "tokens", "--tokenizer", "bytes"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(folder / "tokens" / std::string("train.bin")));
  const auto missing =
      zero_program({"data", "prepare", folder / "none.txt", "--out", folder / "other"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("none.txt"));
}

}  // namespace
}  // namespace zero::test
