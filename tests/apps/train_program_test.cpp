// `zero train`, whole runs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>

#include "tests/apps/train_run.h"
#include "zero/comm/rendezvous.h"

namespace zero::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Train, LearnsAndLeavesItsLogAndWeights) {
  const TrainFolder folder;
  const auto outcome = folder.train({"--stage", "3", "--steps", "30"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto steps = folder.steps();
  ASSERT_EQ(steps.size(), 30u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
    for (const char* key : {"loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "comm_ms"}) {
      EXPECT_TRUE(steps[i][key].is_number()) << key;
    }
    EXPECT_EQ(steps[i]["lr"], 0.01);
  }
  EXPECT_NEAR(folder.losses().front(), std::log(256.0), 0.3);
  EXPECT_LT(folder.losses().back(), 3.5);
  EXPECT_LT(folder.event("validation")["loss"].get<double>(), 3.5);
  EXPECT_EQ(folder.event("validation")["tokens"], 512);
  EXPECT_EQ(folder.event("sample")["prompt"], "line ");
  EXPECT_EQ(folder.event("end")["reason"], "finished");
  const auto config = folder.event("config");
  EXPECT_EQ(config["train"]["seq"], 32);
  EXPECT_EQ(config["world_size"], 2);
  EXPECT_EQ(config["tokens_per_step"], 2 * 4 * 32);
  EXPECT_FALSE(folder.weights().empty());
  EXPECT_EQ(Json::parse(read_file(folder.out() / "config.json"))["n_embd"], 32);
  for (const char* part : {"parameters", "memory before step 1", "rank 1", "comm%", "validation",
                           "sample", "finished"}) {
    EXPECT_THAT(outcome.out, HasSubstr(part));
  }
  EXPECT_EQ(outcome.out.find('\r'), std::string::npos)
      << "no progress bar where stdout is no terminal";
}

TEST(Train, WritesEventsAndTablesWhereTheOptionsSay) {
  const TrainFolder folder;
  const std::vector<std::string> options{"--tensorboard", folder / "events", "--csv",
                                         folder / "tables"};
  const auto outcome = folder.train(options);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::string losses = "step,loss\n";
  for (const auto& step : folder.steps()) {
    // A float of the log as the double that it is.
    losses += fmt::format("{},{}\n", step["step"].get<int>(),
                          static_cast<double>(step["loss"].get<float>()));
  }
  EXPECT_EQ(read_file(folder / "tables/Train_Steps_loss.csv"), losses);
  std::vector<std::string> events;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "events"))
    events.push_back(entry.path().filename());
  EXPECT_THAT(events, testing::ElementsAre(StartsWith("events.out.tfevents.")));
  EXPECT_EQ(
      folder.event("config")["engine"]["tensorboard"],
      Json({{"enabled", true}, {"output_path", (folder / "events").string()}, {"job_name", ""}}));
  const auto again = folder.train(options, "another");
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.err, HasSubstr("holds an earlier run's events.out.tfevents."));
}

TEST(Train, GivesTheSameBitsAtEveryStage) {
  const TrainFolder folder;
  for (const char* dtype : {"fp32", "bf16"}) {
    const std::string reference = std::string("0") + dtype;
    ASSERT_EQ(
        folder.train({"--stage", "0", "--dtype", dtype, "--dropout", "0.1"}, reference).status, 0);
    for (const char* stage : {"1", "2", "3"}) {
      const auto run = stage + std::string(dtype);
      const auto outcome =
          folder.train({"--stage", stage, "--dtype", dtype, "--dropout", "0.1"}, run);
      ASSERT_EQ(outcome.status, 0) << outcome.err;
      EXPECT_EQ(folder.losses(run), folder.losses(reference)) << "stage " << stage << ", " << dtype;
      EXPECT_TRUE(folder.weights(run) == folder.weights(reference))
          << "stage " << stage << ", " << dtype;
    }
  }
}

TEST(Train, ValidatesToTheSameBitsWhateverTheRanksTheMicroBatchAndTheStage) {
  const TrainFolder folder;
  Json expected;
  for (const std::string ranks : {"1", "2", "3"}) {
    for (const std::string micro_batch : {"1", "4"}) {
      for (const std::string stage : {"0", "3"}) {
        // The rate 0 leaves the initial weights as they are.
        const auto run = fmt::format("{}-{}-{}", ranks, micro_batch, stage);
        const auto outcome = folder.train(
            {"--nproc", ranks, "--micro-batch", micro_batch, "--stage", stage, "--steps", "1",
             "--lr", "0", "--min-lr", "0", "--sample-tokens", "0", "--eval-tokens", "1000"},
            run);
        ASSERT_EQ(outcome.status, 0) << outcome.err;
        const auto validation = folder.event("validation", run);
        EXPECT_EQ(validation["tokens"], 1024) << "whole sequences";
        if (expected.is_null()) expected = validation["loss"];
        EXPECT_EQ(validation["loss"].get<double>(), expected.get<double>()) << run;
      }
    }
  }
}

TEST(Train, TellsMemoryAndTrafficBesideTheirFormulas) {
  const TrainFolder folder;
  for (const char* stage : {"0", "1", "2", "3"}) {
    ASSERT_EQ(folder.train({"--stage", stage}, stage).status, 0);
    const auto memory = folder.event("memory", stage);
    const auto traffic = folder.event("traffic", stage);
    ASSERT_EQ(memory["per_rank"].size(), 2u);
    EXPECT_EQ(traffic["steps"], 6);
    for (int rank = 0; rank < 2; ++rank) {
      for (const char* state : {"parameters", "gradients", "optimizer"}) {
        const auto& usage = memory["per_rank"][rank][state];
        // Sharded gradients are none between two steps.
        const char* when = std::string(state) == "gradients" ? "peak" : "current";
        EXPECT_EQ(usage[when], usage["formula"]) << state << " at stage " << stage;
        EXPECT_GT(usage["formula"], 0);
      }
      for (const char* collective : {"all_gather", "reduce_scatter", "all_reduce"}) {
        const auto& count = traffic["per_rank"][rank][collective];
        // A live budget that holds the whole model spares stage 3 the second gather.
        if (std::string(stage) == "3" && std::string(collective) == "all_gather") continue;
        EXPECT_EQ(count["logical_bytes"], count["formula"]) << collective << " at stage " << stage;
      }
    }
  }
}

TEST(Train, StatesOnDiskGiveTheSameWeightsAndAreToldBesideTheMemory) {
  const TrainFolder folder;
  const std::string disk = (folder / "disk").string();
  std::filesystem::create_directory(disk);
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::vector<std::string> options{"--stage", "2", "--dtype", dtype};
    ASSERT_EQ(folder.train(options, "memory-" + dtype).status, 0);
    auto with_disk = options;
    with_disk.insert(with_disk.end(), {"--offload-optimizer", "nvme", "--nvme-path", disk});
    const auto outcome = folder.train(with_disk, "disk-" + dtype);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("on disk"));
    EXPECT_TRUE(folder.weights("disk-" + dtype) == folder.weights("memory-" + dtype));
    EXPECT_TRUE(std::filesystem::is_empty(disk));
    const auto memory = folder.event("memory", "disk-" + dtype);
    for (const auto& rank : memory["per_rank"]) {
      EXPECT_EQ(rank["optimizer"]["peak"], 0);
      EXPECT_GT(rank["disk"]["bytes"], 0);
      EXPECT_GT(rank["disk"]["written"], rank["disk"]["bytes"]);
    }
  }
  const auto refused = folder.train({"--offload-optimizer", "nvme"}, "refused");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("nvme_path"));
}

TEST(Train, StatesOnTheHostGiveTheSameWeightsAndTheirTrafficIsToldWithTheFormula) {
  const TrainFolder folder;
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::vector<std::string> options{"--stage", "3", "--dtype", dtype, "--accumulate", "2"};
    ASSERT_EQ(folder.train(options, "device-" + dtype).status, 0);
    auto there = options;
    there.insert(there.end(), {"--offload-optimizer", "cpu", "--offload-param", "cpu",
                               "--live-parameters", "0", "--device-memory", "64MB"});
    const auto outcome = folder.train(there, "host-" + dtype);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("host_optimizer"));
    EXPECT_THAT(outcome.out, HasSubstr("device and host a step"));
    EXPECT_TRUE(folder.weights("host-" + dtype) == folder.weights("device-" + dtype));
    const auto run = "host-" + dtype;
    const auto memory = folder.event("memory", run);
    for (const auto& rank : memory["per_rank"]) {
      for (const char* state : {"host_parameters", "host_gradients", "host_optimizer"}) {
        EXPECT_EQ(rank[state]["current"], rank[state]["formula"]);
        EXPECT_GT(rank[state]["formula"], 0);
      }
      EXPECT_EQ(rank["optimizer"]["peak"], 0);
      EXPECT_LT(rank["device"]["peak"], 64 << 20);
    }
    const auto traffic = folder.event("traffic", run);
    for (const auto& rank : traffic["per_rank"]) {
      EXPECT_EQ(rank["host"]["down"], rank["host"]["down_formula"]);
      EXPECT_GT(rank["host"]["up"], 0);
    }
  }
}

TEST(Train, RefusesAModelThatExceedsItsDeviceAndNamesWhatFits) {
  const TrainFolder folder;
  const auto refused = folder.train({"--device-memory", "10KB"}, "refused");
  EXPECT_NE(refused.status, 0);
  EXPECT_THAT(refused.err, HasSubstr("The device has 10.0 KiB (device_memory)"));
  EXPECT_THAT(refused.err, HasSubstr("--offload-optimizer cpu"));
}

TEST(Train, RefusesAModelThatExceedsItsMemoryBudget) {
  const TrainFolder folder;
  const auto refused = folder.train({"--memory-budget", "10KB"}, "refused");
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.err, StartsWith("zero: error: The memory budget is 10.0 KiB"));
  EXPECT_EQ(folder.train({"--memory-budget", "1GB", "--stage", "3"}, "fits").status, 0);
}

TEST(Train, RunsAlone) {
  const TrainFolder folder;
  const auto outcome = folder.train({"--nproc", "1", "--accumulate", "2", "--eval-every", "2"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder.steps().size(), 6u);
  for (const auto& step : folder.steps()) EXPECT_EQ(step["comm_ms"], 0);
}

TEST(Train, TakesItsOptionsFromAFileAndTheCommandLineFirst) {
  const TrainFolder folder;
  write_file(folder / "config.json",
             R"({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.005}}, "train": {"steps": 3, "seq": 16}})");
  const auto outcome =
      test::run({ZERO_PROGRAM, "train", "--config", folder / "config.json", "--model",
                 folder.model(), "--data", folder.text(), "--out", folder.out(), "--seq", "8",
                 "--schedule", "constant", "--warmup", "0"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder.steps().size(), 3u);
  EXPECT_EQ(folder.steps()[0]["lr"], 0.005);
  EXPECT_EQ(folder.event("config")["train"]["seq"], 8);
  EXPECT_EQ(folder.event("config")["tokens_per_step"], 2 * 8);
}

std::vector<double> rates_of(const TrainFolder& folder, const std::string& run = "run") {
  std::vector<double> rates;
  for (const auto& step : folder.steps(run)) rates.push_back(step["lr"]);
  return rates;
}

TEST(Train, CountsFlopsForTheConsoleOrAFile) {
  const TrainFolder folder;
  const auto told = folder.train({"--flops-profiler", "--nproc", "1"});
  ASSERT_EQ(told.status, 0) << told.err;
  EXPECT_THAT(told.out, AllOf(HasSubstr("FLOPs of step 2"), HasSubstr("the largest modules")));
  EXPECT_GT(folder.event("flops")["macs"], 0);
  const auto filed =
      folder.train({"--flops-profiler", folder / "flops.txt", "--nproc", "1"}, "filed");
  ASSERT_EQ(filed.status, 0) << filed.err;
  EXPECT_THAT(filed.out, HasSubstr("modules in " + (folder / "flops.txt").string()));
  EXPECT_THAT(test::read_file(folder / "flops.txt"), HasSubstr("the largest modules"));
}

TEST(Train, SaysHowRunsGoToWeightsAndBiases) {
  const TrainFolder folder;
  const auto refused = folder.train({"--wandb", folder / "wb", "--nproc", "1"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("--wandb is replaced by --tensorboard DIR"),
                                 HasSubstr("`wandb sync DIR`")));
}

TEST(Train, FollowsTheScheduleOfAFileOrOfTheCommandLine) {
  using testing::ElementsAre;
  const TrainFolder folder;
  write_file(folder / "ds.json", R"({"optimizer": {"type": "Adam", "params": {"lr": 0.004}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4,
                                                   "warmup_type": "linear"}},
      "steps_per_print": 2, "comet": {"enabled": true}})");
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--config", folder / "ds.json", "--nproc", "1"});
    return more;
  };
  // The defaults of the test name --schedule and --lr, which come before the file.
  auto words = folder.command(with({}), "file");
  for (const char* name : {"--schedule", "--lr"}) {
    const auto at = std::find(words.begin(), words.end(), name);
    words.erase(at, at + 2);
  }
  const auto outcome = test::run(words);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(rates_of(folder, "file"), ElementsAre(0, 0, 0.001, 0.002, 0.003, 0.004));
  EXPECT_THAT(outcome.err, HasSubstr("comet: libzero sends nothing to Comet"));
  EXPECT_EQ(folder.event("config", "file")["engine"]["scheduler"]["type"], "WarmupLR");

  // The program's own schedule comes in its place; and one of the command line in both's.
  const auto own = folder.train(with({"--lr", "0.01"}), "own");
  ASSERT_EQ(own.status, 0) << own.err;
  EXPECT_THAT(rates_of(folder, "own"), ElementsAre(0.01, 0.01, 0.01, 0.01, 0.01, 0.01));
  words.insert(words.end(), {"--overwrite", "--scheduler",
                             "OneCycle:cycle_min_lr=0.001,cycle_max_lr=0.003,"
                             "cycle_first_step_size=2"});
  const auto cycle = test::run(words);
  ASSERT_EQ(cycle.status, 0) << cycle.err;
  EXPECT_THAT(rates_of(folder, "file"), ElementsAre(0.001, 0.002, 0.003, 0.002, 0.001, 0.001));
  const auto lr = folder.train(with({"--scheduler", "LRRangeTest"}), "test");
  EXPECT_THAT(lr.err, HasSubstr("--lr has no effect: the section scheduler says all rates"));
}

TEST(Train, SaysWhatWeightDecayActsOn) {
  const TrainFolder folder;
  const auto usual = folder.train({"--steps", "2"});
  ASSERT_EQ(usual.status, 0) << usual.err;
  EXPECT_THAT(usual.out, HasSubstr("optimizer AdamW, weight decay 0.1 of "));
  EXPECT_THAT(usual.out, HasSubstr(" matrices, none of "));
  const auto all = folder.train({"--steps", "2", "--decay-all"}, "all");
  ASSERT_EQ(all.status, 0) << all.err;
  EXPECT_THAT(all.out, HasSubstr("weight decay 0.1 of all "));
  EXPECT_NE(folder.weights(), folder.weights("all"));
}

// The weights that it writes are the mean of its iterates, at every stage; training is the same
// whether it validates or not, and goes on from a checkpoint, which exports the same mean.
TEST(Train, ScheduleFreeAdamWWritesTheMeanOfItsIteratesInTheSameBits) {
  const TrainFolder folder;
  const auto train = [&](std::vector<std::string> more, const std::string& name) {
    for (const auto* word : {"--optimizer", "schedule_free_adamw:eps=1e-7", "--warmup", "2"})
      more.emplace_back(word);
    const auto outcome = folder.train(more, name);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return folder.weights(name);
  };
  const auto weights = train({"--eval-every", "2", "--save-every", "6"}, "run");
  EXPECT_EQ(folder.losses().size(), 6u);
  EXPECT_TRUE(train({"--stage", "3"}, "paged") == weights);
  EXPECT_EQ(folder.losses("paged"), folder.losses());
  train({"--stage", "2", "--steps", "3", "--save-every", "3"}, "halves");
  EXPECT_TRUE(train({"--stage", "1", "--resume"}, "halves") == weights);

  const std::string exported = folder / "exported";
  const auto outcome = run({ZERO_PROGRAM, "ckpt", "export", "--to", "hf",
                            (folder.out() / "checkpoint-6").string(), exported});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto differences = run({ZERO_PROGRAM, "ckpt", "diff", folder.out() / "model.safetensors",
                                exported + "/model.safetensors"});
  EXPECT_EQ(differences.status, 0) << differences.out;

  EXPECT_THAT(
      folder.train({"--optimizer", "schedule_free_adamw", "--schedule", "linear"}, "no").err,
      HasSubstr("the optimizer is ScheduleFreeAdamW"));
  EXPECT_THAT(folder.train({"--optimizer", "schedule_free_adam"}, "no").err,
              HasSubstr("Did you mean 'schedule_free_adamw'"));
}

// Its AdamW's rate follows the schedule, at its own height.
TEST(Train, LearnsWithEachOptimizer) {
  const TrainFolder folder;
  for (const auto* section :
       {R"({"type": "Lamb", "params": {"lr": 0.01}})",
        R"({"type": "Lion", "params": {"lr": 0.001}})",
        R"({"type": "Adagrad", "params": {"lr": 0.01}})",
        R"({"type": "Muon", "params": {"lr": 0.01, "adam_lr": 0.003}})",
        R"({"type": "Adafactor", "params": {"lr": 0.1}})",
        R"({"type": "Apollo", "params": {"rank": 4}})", R"({"type": "ApolloMini"})",
        R"({"type": "ScheduleFreeAdamW", "params": {"lr": 0.01}})"}) {
    write_file(folder / "config.json", std::string(R"({"optimizer": )") + section + "}");
    const std::string file = folder / "config.json";
    const auto outcome = folder.train(
        {"--config", file, "--nproc", "2", "--stage", "2", "--steps", "20", "--overwrite"});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const auto losses = folder.losses();
    EXPECT_LT(losses.back(), losses.front()) << section;
  }
}

TEST(Train, TheFilesBatchHoldsForTheCommandLineToo) {
  const TrainFolder folder;
  const std::string file = folder / "config.json";
  write_file(file, R"({"train_batch_size": 16})");
  const auto outcome = folder.train({"--config", file, "--micro-batch", "2"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder.event("config")["engine"]["gradient_accumulation_steps"], 4);
  EXPECT_EQ(folder.event("config")["tokens_per_step"], 16 * 32);
  const auto refused =
      folder.train({"--config", file, "--micro-batch", "2", "--accumulate", "3"}, "refused");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("train_batch_size is 16, but"));
}

TEST(Train, ResumesAsIfItHadNotStopped) {
  const TrainFolder folder;
  const std::vector<std::string> options{"--stage", "3",  "--dropout",    "0.1",
                                         "--steps", "60", "--save-every", "4"};
  ASSERT_EQ(folder.train(options, "whole").status, 0);
  {
    Program program(folder.command(options, "cut"));
    ASSERT_TRUE(folder.wait_for_step(9, "cut"));
    program.signal(SIGKILL);
    program.wait();
  }
  EXPECT_EQ(folder.weights("cut"), "");
  auto resumed = options;
  resumed.push_back("--resume");
  const auto outcome = folder.train(resumed, "cut");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto steps = folder.steps("cut");
  ASSERT_EQ(steps.size(), 60u) << "each step once, the killed run's later ones not twice";
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i]["step"], i + 1);
  EXPECT_EQ(folder.losses("cut").back(), folder.losses("whole").back());
  EXPECT_TRUE(folder.weights("cut") == folder.weights("whole"));
}

TEST(Train, StopsCleanlyAtASignal) {
  for (const int signal : {SIGINT, SIGTERM}) {
    for (const char* ranks : {"1", "2"}) {
      const TrainFolder folder;
      Program program(folder.command({"--steps", "1000000", "--nproc", ranks, "--stage", "3"}));
      ASSERT_TRUE(folder.wait_for_step(3));
      program.signal(signal);
      const auto outcome = program.wait(seconds(30));
      EXPECT_EQ(outcome.status, 130) << outcome.err;
      EXPECT_FALSE(folder.weights().empty());
      EXPECT_EQ(folder.event("end")["reason"],
                std::string("stopped by SIG") + sigabbrev_np(signal));
      EXPECT_EQ(folder.event("end")["steps"], folder.steps().back()["step"]);
      EXPECT_EQ(outcome.err.find("error"), std::string::npos) << outcome.err;
    }
  }
}

/// Expects a run to end as at a signal, with its weights.
void expect_stopped(const TrainFolder& folder, Program& program) {
  program.signal(SIGINT);
  const auto outcome = program.wait(seconds(60));
  EXPECT_EQ(outcome.status, 130) << outcome.err;
  EXPECT_FALSE(folder.weights().empty());
  EXPECT_EQ(folder.event("end")["reason"], "stopped by SIGINT");
  EXPECT_EQ(outcome.err.find("error"), std::string::npos) << outcome.err;
}

TEST(Train, ASignalEndsAValidation) {
  for (const char* every : {"0", "1"}) {  // at the end, and between steps
    const TrainFolder folder;
    std::string text;
    for (int i = 0; i < 200000; ++i) text += "a long text that it takes minutes to validate on\n";
    write_file(folder / "long.txt", text);
    const std::string steps = std::string(every) == "0" ? "1" : "5";
    Program program(
        folder.command({"--steps", steps, "--eval-every", every, "--val-data", folder / "long.txt",
                        "--eval-tokens", "9000000", "--stage", "3", "--save-every", "2"}));
    ASSERT_TRUE(folder.wait_for_step(1));
    expect_stopped(folder, program);
    EXPECT_EQ(folder.steps().size(), 1u);
    EXPECT_TRUE(std::filesystem::exists(folder.out() / "checkpoint-1/manifest.json"));
    for (const auto& line : folder.log()) EXPECT_NE(line.value("event", ""), "validation");
  }
}

TEST(Train, ASignalEndsASample) {
  const TrainFolder folder;
  Program program(folder.command({"--steps", "1", "--sample-tokens", "100000000", "--stage", "3"}));
  const auto begin = steady_clock::now();
  while (!std::filesystem::exists(folder.out() / "config.json") &&
         steady_clock::now() - begin < seconds(60))
    std::this_thread::sleep_for(milliseconds(10));
  expect_stopped(folder, program);
}

TEST(Train, SaysThatItsInitialWeightsAreRandom) {
  const TrainFolder folder;
  const auto outcome = folder.train({"--steps", "1"});
  EXPECT_THAT(outcome.out, HasSubstr("vocabulary 256), fp32, random initial weights\n"));
  EXPECT_THAT(test::run({ZERO_PROGRAM, "train", "--help"}).out, HasSubstr("initial weights are"));
}

TEST(Train, AnErrorBeginsALineOfTheTerminal) {
  for (const char* ranks : {"1", "2"}) {
    const TrainFolder folder;
    auto words = folder.command({"--nproc", ranks, "--lr", "1e36", "--clip", "0", "--steps", "50"});
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int terminal = -1;
    const pid_t program = forkpty(&terminal, nullptr, nullptr, nullptr);
    ASSERT_GE(program, 0);
    if (program == 0) {
      execv(arguments[0], arguments.data());
      _exit(127);
    }
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = read(terminal, buffer, sizeof(buffer))) > 0;)
      text.append(buffer, static_cast<size_t>(got));
    close(terminal);
    waitpid(program, nullptr, 0);
    ASSERT_THAT(text, HasSubstr(" of 50, ")) << "a progress bar";
    const auto error = text.find("zero: error: The loss of step");
    ASSERT_NE(error, std::string::npos) << text;
    const std::string rank = std::string(ranks) == "1" ? "" : "[0] ";
    const std::string clear = "\r\033[K" + rank;
    EXPECT_EQ(text.substr(error - clear.size(), clear.size()), clear);
  }
}

TEST(Train, GoesOnWhereNobodyReadsItsOutput) {
  const TrainFolder folder;
  for (const char* ranks : {"1", "2"}) {
    std::string line = "{";
    for (const auto& word : folder.command({"--nproc", ranks, "--steps", "60"}, ranks))
      line += " '" + word + "'";
    const auto outcome = test::run({"/bin/sh", "-c", line + "; echo status $? >&2; } | true"});
    EXPECT_THAT(outcome.err, HasSubstr("status 0\n"));
    EXPECT_EQ(folder.event("end", ranks)["reason"], "finished");
    EXPECT_FALSE(folder.weights(ranks).empty());
  }
}

/// The launcher's children.
std::vector<pid_t> children(pid_t parent) {
  std::ifstream file("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) +
                     "/children");
  return {std::istream_iterator<pid_t>(file), {}};
}

std::vector<std::string> shared_memory_files() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().string().find("zero") != std::string::npos) names.push_back(entry.path());
  }
  return names;
}

TEST(Train, ARankThatIsKilledEndsTheJobWithItsName) {
  for (const char* stage : {"0", "3"}) {
    const TrainFolder folder;
    const auto before = shared_memory_files();
    Program program(folder.command({"--steps", "1000000", "--nproc", "3", "--stage", stage}));
    ASSERT_TRUE(folder.wait_for_step(3));
    const auto ranks = children(program.pid());
    ASSERT_EQ(ranks.size(), 3u);
    const auto begin = steady_clock::now();
    kill(ranks[1], SIGKILL);
    const auto outcome = program.wait(seconds(30));
    EXPECT_LT(steady_clock::now() - begin, seconds(5));
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_THAT(outcome.err, HasSubstr("rank 1 (pid " + std::to_string(ranks[1]) +
                                       ") was killed by signal 9 (SIGKILL)"));
    EXPECT_EQ(shared_memory_files(), before);
    for (const pid_t rank : ranks) EXPECT_NE(kill(rank, 0), 0);
  }
}

/// Kills `rank` of three `delay` after it was started, and expects the job to end with its name.
/// With `held` the rank is stopped at once, so that its peers are waiting for it when it dies.
void expect_death_at_start_ends_the_job(size_t rank, milliseconds delay, bool held) {
  SCOPED_TRACE("rank " + std::to_string(rank) + " killed after " + std::to_string(delay.count()) +
               " ms" + (held ? ", stopped until then" : ""));
  const TrainFolder folder;
  const auto before = shared_memory_files();
  Program program(folder.command({"--steps", "1000000", "--nproc", "3", "--stage", "3"}));
  std::vector<pid_t> ranks;
  for (int look = 0; ranks.size() <= rank && look < 60000; ++look) {
    std::this_thread::sleep_for(milliseconds(1));
    ranks = children(program.pid());
  }
  ASSERT_GT(ranks.size(), rank);
  if (held) kill(ranks[rank], SIGSTOP);
  std::this_thread::sleep_for(delay);
  if (held) {
    ASSERT_FALSE(std::filesystem::exists(folder.out() / "log.jsonl")) << "they have met";
  }
  ranks = children(program.pid());
  const auto begin = steady_clock::now();
  kill(ranks[rank], SIGKILL);
  const auto outcome = program.wait(seconds(30));
  EXPECT_LT(steady_clock::now() - begin, seconds(5));
  EXPECT_EQ(outcome.status, 128 + SIGKILL);
  EXPECT_THAT(outcome.err,
              HasSubstr("rank " + std::to_string(rank) + " (pid " + std::to_string(ranks[rank]) +
                        ") was killed by signal 9 (SIGKILL)"));
  EXPECT_EQ(shared_memory_files(), before);
  for (const pid_t pid : ranks) EXPECT_NE(kill(pid, 0), 0);
}

TEST(Train, ARankThatIsKilledBeforeTheGroupHasMetEndsTheJobWithItsName) {
  for (const size_t rank : {0, 1, 2}) {
    for (const int delay : {0, 1000}) {
      expect_death_at_start_ends_the_job(rank, milliseconds(delay), true);
    }
  }
}

TEST(Train, ARankThatIsKilledAtAnyMomentOfItsStartEndsTheJobWithItsName) {
  for (const int delay : {0, 50, 100, 200, 300, 500}) {
    expect_death_at_start_ends_the_job(static_cast<size_t>(delay / 50) % 3, milliseconds(delay),
                                       false);
  }
}

TEST(Train, RunsUnderMpirun) {
  const TrainFolder folder;
  ASSERT_EQ(folder.train({"--stage", "2"}, "own").status, 0);
  auto command = folder.command({"--stage", "2", "--nproc", "2"}, "mpi");
  const std::vector<std::string> mpirun{"mpirun", "--allow-run-as-root", "--oversubscribe", "-n",
                                        "2"};
  command.insert(command.begin(), mpirun.begin(), mpirun.end());
  const auto outcome = test::run(command);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(folder.losses("mpi"), folder.losses("own"));

  auto endless = folder.command({"--stage", "2", "--nproc", "2", "--steps", "1000000"}, "killed");
  endless.insert(endless.begin(), mpirun.begin(), mpirun.end());
  Program program(endless);
  ASSERT_TRUE(folder.wait_for_step(3, "killed"));
  const auto ranks = children(program.pid());
  ASSERT_EQ(ranks.size(), 2u);
  const auto begin = steady_clock::now();
  kill(ranks[1], SIGKILL);
  const auto killed = program.wait(seconds(30));
  EXPECT_LT(steady_clock::now() - begin, seconds(5));
  EXPECT_NE(killed.status, 0);
  EXPECT_THAT(killed.out + killed.err, HasSubstr("rank 1 "));
}

TEST(Train, RunsInTorchrunsEnvironment) {
  const TrainFolder folder;
  const auto store = comm::host_local_store(seconds(60));
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<Program>(
        folder.command({"--nproc", "2", "--stage", "1"}),
        std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                           {"WORLD_SIZE", "2"},
                                           {"LOCAL_RANK", std::to_string(rank)},
                                           {"LOCAL_WORLD_SIZE", "2"},
                                           {"MASTER_ADDR", comm::kLoopback},
                                           {"MASTER_PORT", std::to_string(store.port)},
                                           {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  }
  for (auto& rank : ranks) {
    const auto outcome = rank->wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
  EXPECT_EQ(folder.steps().size(), 6u);
}

}  // namespace
}  // namespace zero::test
