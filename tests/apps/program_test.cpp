// Tests the program's manners.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <utility>

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
  EXPECT_EQ(zero_program({"train", "--help"}).out, train.out);
  const auto all = zero_program({"train", "--help-all"});
  EXPECT_EQ(all.status, 0);
  const std::vector<std::string> common{
      "--config", "--nproc",       "--model",  "--data",  "--out",   "--steps",
      "--seq",    "--micro-batch", "--lr",     "--dtype", "--stage", "--offload-optimizer",
      "--device", "--save-every",  "--resume", "--from"};
  EXPECT_EQ(common.size(), 16u);
  for (const auto& option : common) {
    EXPECT_THAT(train.out, HasSubstr(option + " "));
    EXPECT_THAT(all.out, HasSubstr(option + " "));
  }
  for (const char* option : {"--accumulate", "--clip", "--seed", "--threads", "--lenient",
                             "--beta1", "--no-update-in-forward", "--rewind-spikes"}) {
    EXPECT_THAT(train.out, testing::Not(HasSubstr(option)));
    EXPECT_THAT(all.out, HasSubstr(option));
  }
  EXPECT_THAT(train.out, HasSubstr("`zero train --help-all` has the rest of the options."));
  EXPECT_THAT(all.out, testing::Not(HasSubstr("has the rest")));
}

TEST(Program, RefusesAnOptionThatIsGivenTwice) {
  const auto refused = [](std::vector<std::string> arguments) {
    const auto outcome = zero_program(arguments);
    EXPECT_EQ(outcome.status, 2);
    return outcome.err;
  };
  EXPECT_THAT(refused({"config", "--steps", "3", "--seq", "8", "--steps", "4"}),
              HasSubstr("zero config: --steps is given 2 times (3, 4); give it once."));
  EXPECT_THAT(refused({"train", "--resume", "--resume"}),
              HasSubstr("zero train: --resume is given 2 times; give it once."));
  EXPECT_THAT(refused({"launch", "-n", "2", "--nproc", "3", "--", "true"}),
              HasSubstr("is given 2 times (2, 3)"));
  EXPECT_THAT(refused({"data", "prepare", "x", "--out", "a", "--out", "b"}),
              HasSubstr("--out is given 2 times (a, b)"));
}

TEST(Program, RefusesTheRendezvousOfSeveralHostsOnOne) {
  for (const char* option : {"--master-port", "--master-addr"}) {
    const auto outcome = zero_program({"launch", "-n", "2", option, "29511", "--", "true"});
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(std::string(option) + " is 29511, but --nnodes is 1"),
                                   HasSubstr("Leave"), HasSubstr("--nnodes")));
  }
}

TEST(Program, ChecksWhatTrainingWouldCheck) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.json";
  write_file(file, R"({"train": {"model": "gpt2-nano"}})");
  const auto check = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"config", "--check", file});
    return zero_program(more);
  };
  EXPECT_EQ(check({}).status, 0) << check({}).out;
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes{
      {{"--seq", "1025"}, "The option 'seq' is 1025, but the model gpt2-nano takes at most 1024"},
      {{"--steps", "5", "--warmup", "6"}, "The option 'warmup' is 6"},
      {{"--overwrite", "--resume"}, "'overwrite' is given together with resume"},
      {{"--micro-batch", "0"}, "--micro-batch is 0; it must be a whole number, at least 1"},
      {{"--steps", "5", "--profile", folder / "p.json", "--profile-step", "6"},
       "The profile is to be of step 6"},
      {{"--model", "gpt-nano"}, "There is no model named 'gpt-nano'"},
      {{"--scheduler", "WarmupLR:warmup_num_steps=7", "--min-lr", "0.1"}, "min_lr is 0.1"}};
  for (const auto& [options, message] : mistakes) {
    const auto outcome = check(options);
    EXPECT_EQ(outcome.status, 2) << message;
    EXPECT_THAT(outcome.out + outcome.err, HasSubstr(message));
  }
  EXPECT_THAT(
      check({"--scheduler", "OneCycle:cycle_min_lr=1e-4,cycle_max_lr=1e-3", "--lr", "0.1"}).out,
      HasSubstr("has no effect here\n  --lr has no effect"));
}

TEST(Program, SaysWhereAFileIsNotJson) {
  const TemporaryFolder folder;
  const std::string file = folder / "ds.yaml";
  write_file(file, "zero_optimization:\n  stage: 3\n");
  const auto outcome = zero_program({"config", file});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr(file + " is not JSON (line 1, column 1, at \"zero_optimization:\")"),
                    HasSubstr("A configuration is a JSON object, as {"),
                    testing::Not(HasSubstr("json.exception"))));
  write_file(file, "{\"train\": {");
  EXPECT_THAT(zero_program({"config", file}).err, HasSubstr("it ends too early"));
}

TEST(Program, RefusesAModelOfABillionLayersAtOnce) {
  const TemporaryFolder folder;
  const std::string file = folder / "huge.json";
  write_file(file, R"({"n_layer": 1000000000})");
  const auto outcome = zero_program({"config", "--model", file});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("huge.json"), HasSubstr("n_layer is 1000000000"),
                                 HasSubstr("at most 10000")));
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
  // The output is a configuration itself.
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
              HasSubstr("cost     A rank holds 1 / (ranks of a host)"));
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
