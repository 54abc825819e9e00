// `zero plan` and `zero train --plan` as a user runs them: the configuration trains, files are
// whole, a run has the states of its plan, bad input is named.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/apps/train_run.h"
#include "tests/support/run_program.h"
#include "zero/base/error.h"

namespace zero::test {
namespace {

using ::testing::HasSubstr;

Outcome plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {ZERO_PROGRAM, "plan"});
  return run(arguments);
}

// The plan for two ranks of a CPU is what `zero train` then takes.
TEST(Plan, WritesAConfigurationThatTrains) {
  const TemporaryFolder folder;
  const std::string config = folder / "ds_config.json";
  const std::string json = folder / "plan.json";
  const auto outcome =
      plan({"--model", "gpt2-nano", "--batch", "4", "--seq", "64", "--autocast", "bf16", "--device",
            "epyc 9654", "--updates", "in-backward,delayed", "--out", config, "--json", json});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("ZeRO is not needed"));
  EXPECT_THAT(outcome.out, HasSubstr("gpt2-nano in fp32 under autocast to bf16"));
  const auto results = nlohmann::json::parse(read_file(json)).at("results");
  EXPECT_GT(results.size(), 4U);
  int in_backward = 0;
  int delayed = 0;
  for (const auto& each : results) {
    const auto& file = each.at("ds_config");
    EXPECT_TRUE(file.at("torch_autocast").at("enabled").get<bool>());
    in_backward += file.value("update_in_backward", false) ? 1 : 0;
    delayed += each.at("configuration").get<std::string>().find("delayed") != std::string::npos;
    EXPECT_TRUE(!file.contains("update_in_backward") || file.at("gradient_clipping") == 0);
  }
  EXPECT_GT(in_backward, 0);
  EXPECT_GT(delayed, 0);
  EXPECT_TRUE(results.at(0).at("fits").get<bool>());
  EXPECT_GT(results.at(0).at("memory").at("activations").get<int64_t>(), 0);
  const auto text = folder.write("text.txt", std::string(20000, 'a'));
  const auto trained =
      run({ZERO_PROGRAM, "train",       "--config",        config, "--model",       "gpt2-nano",
           "--data",     text,          "--seq",           "64",   "--steps",       "1",
           "--nproc",    "2",           "--sample-tokens", "0",    "--eval-tokens", "0",
           "--out",      folder / "run"});
  EXPECT_EQ(trained.status, 0) << trained.err;
}

// Time and cost follow from the tokens a second, the picture is an SVG, and the machine that was
// measured is one that a file describes.
TEST(Plan, SaysWhatTokensTakeAndDrawsThePlan) {
  const TemporaryFolder folder;
  const std::string json = folder / "plan.json";
  const std::string svg = folder / "plan.svg";
  const auto outcome =
      plan({"--model",      "gpt2",  "--batch", "64",   "--device", "h100",  "--tokens", "10B",
            "--price",      "2",     "--mtbf",  "1000", "--scale",  "8..16", "--jitter", "0.03",
            "--stragglers", "0.001", "--json",  json,   "--svg",    svg});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("That counts failures."));
  EXPECT_THAT(outcome.out, HasSubstr("Each step waits for the slowest of 8 ranks"));
  const auto file = nlohmann::json::parse(read_file(json));
  const auto& best = file.at("results").at(0);
  const auto& training = best.at("training");
  const double seconds = 10e9 / best.at("tokens_per_second").get<double>();
  const double goodput = training.at("goodput").get<double>();
  EXPECT_LT(goodput, 1);
  EXPECT_NEAR(training.at("seconds").get<double>(), seconds / goodput, 1e-6 * seconds);
  EXPECT_NEAR(training.at("cost").get<double>(), seconds / goodput / 3600 * 8 * 2, 1e-6 * seconds);
  EXPECT_GT(file.at("options").at("scale").at(1).at("training").at("cost").get<double>(), 0);
  const auto picture = read_file(svg);
  EXPECT_THAT(picture, HasSubstr("<svg "));
  for (const auto* says : {"activations", "compute", "16 ranks", "memory of a rank"})
    EXPECT_THAT(picture, HasSubstr(says));
}

TEST(Plan, MeasuresThisMachine) {
  const TemporaryFolder folder;
  const std::string json = folder / "here.json";
  const auto outcome = plan({"--model", "gpt2-nano", "--batch", "4", "--seq", "64", "--here",
                             "--nvme-path", folder.path(), "--json", json});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("2 ranks of this machine on 1 host"));
  const auto cluster = nlohmann::json::parse(read_file(json)).at("options").at("cluster");
  for (const auto* key : {"flops", "flops_fp32", "bandwidth", "link", "nvme", "host_memory"})
    EXPECT_GT(cluster.at(key).get<double>(), 1e6) << key;
  const auto hardware = folder.write("hardware.json", cluster.dump());
  const auto again = plan({"--model", "gpt2-nano", "--batch", "4", "--seq", "64", "--hardware",
                           hardware, "--json", json});
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(nlohmann::json::parse(read_file(json)).at("options").at("cluster").at("flops"),
            cluster.at("flops"));
}

// The plan of a run has the states of that run, and the run then finds an empty place.
TEST(TrainPlan, SaysWhatTheRunTakesAndWritesNothing) {
  const TrainFolder folder;
  const std::vector<std::string> run{"--stage",     "2",    "--dtype",      "bf16",
                                     "--autocast",  "bf16", "--accumulate", "2",
                                     "--lora-rank", "4"};
  auto asks = run;
  asks.emplace_back("--plan");
  const auto planned = folder.train(asks);
  ASSERT_EQ(planned.status, 0) << planned.err;
  EXPECT_EQ(planned.err, "");
  EXPECT_THAT(planned.out, HasSubstr("16 sequences of 32 tokens; 2 ranks of this machine"));
  EXPECT_THAT(planned.out, HasSubstr("in bf16 under autocast to bf16"));
  EXPECT_THAT(planned.out, HasSubstr("stage 2, micro-batch 4 x 2"));
  EXPECT_THAT(planned.out, HasSubstr("Its 6 steps take "));
  EXPECT_THAT(planned.out, HasSubstr("ZeRO is"));
  EXPECT_FALSE(std::filesystem::exists(folder.out()));
  ASSERT_EQ(folder.train(run).status, 0);
  const auto held = folder.event("memory").at("per_rank").at(0);
  for (const auto* state : {"parameters", "gradients", "optimizer"}) {
    const auto bytes = format_bytes(held.at(state).at("peak").get<double>());
    EXPECT_THAT(planned.out, HasSubstr(fmt::format("  {:<18} {:>12}\n", state, bytes)));
  }
}

// The disk of the run is measured with the machine.
TEST(TrainPlan, KnowsTheDiskOfTheRun) {
  const TrainFolder folder;
  const auto planned = folder.train({"--plan", "--offload-optimizer", "nvme", "--nvme-path",
                                     (folder / "").string(), "--delayed-update-after", "2"});
  ASSERT_EQ(planned.status, 0) << planned.err;
  EXPECT_THAT(planned.out, HasSubstr("; a disk of "));
  EXPECT_THAT(planned.out, HasSubstr("steps with a delayed update, which come after the first 2"));
  EXPECT_THAT(planned.out, HasSubstr("delayed updates, micro-batch"));
  EXPECT_THAT(planned.out, HasSubstr("Its 6 steps take "));
  const auto nowhere =
      folder.train({"--plan", "--offload-optimizer", "nvme", "--nvme-path", "/nowhere"});
  EXPECT_NE(nowhere.status, 0);
  EXPECT_THAT(nowhere.err, HasSubstr("/nowhere"));
}

TEST(TrainPlan, NamesWhatItCannotUse) {
  const TrainFolder folder;
  const std::string inference = folder / "inference.json";
  const std::string model = folder / "other_model.json";
  const std::string list = folder / "list.json";
  write_file(inference, R"({"dtype": "fp16", "tensor_parallel": {"tp_size": 4}})");
  write_file(model, R"({"model_type": "gpt2"})");
  write_file(list, "[1, 2]");
  for (const auto& [options, says] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--plan", "--stage", "4"}, "stage"},
           {{"--plan", "--data", "/nowhere.txt"}, "/nowhere.txt"},
           {{"--plan", "--config", inference}, "is a configuration of inference"},
           {{"--plan", "--config", model}, "is a model's config.json, which --model takes"},
           {{"--plan", "--config", list}, "must be an object"},
           {{"--plan", "--seq", "4096"}, "at most 64 tokens"},
           {{"--plan", "--device", "cuda"}, "zero plan --device"}}) {
    const auto outcome = folder.train(options);
    EXPECT_NE(outcome.status, 0) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(says));
    EXPECT_FALSE(std::filesystem::exists(folder.out()));
  }
}

TEST(Plan, NamesWhatItCannotUse) {
  const TemporaryFolder folder;
  const std::string training = folder.write("ds.json", R"({"train_batch_size": 8})");
  const std::string empty = folder.write("empty.json", "");
  for (const auto& [arguments, says] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--device", "h1000"}, "No device is known as 'h1000'"},
           {{"--batch", "7"}, "Give a multiple of 8"},
           {{"--seq", "4096"}, "at most 1024 tokens"},
           {{"--network", "0GB/s"}, "should be a number above 0"},
           {{"--network", "10"}, "--network is '10', which is 10 bytes a second without a unit"},
           {{"--link", "5"}, "Give a unit, as --link 10Gbit/s"},
           {{"--nvme", "3k"}, "--nvme is '3k', which is 3000 bytes a second"},
           {{"--autocast", "fp16", "--dtype", "bf16"}, "--autocast is fp16, but --dtype is bf16"},
           {{"--scale", "9"}, "as 8..4096"},
           {{"--tokens", "many"}, "--tokens is 'many'"},
           {{"--price", "2"}, "there are no --tokens"},
           {{"--updates", "lazily"}, "lazily"},
           {{"--straggler-slower", "2"}, "--stragglers 0.001"},
           {{"--svg", "/nowhere/plan.svg"}, "--svg is /nowhere/plan.svg"},
           {{"--here", "--hosts", "2"}, "--network 10Gbit"},
           {{"--here", "--hardware", "machine.json"}, "--hardware machine.json"},
           {{"--scale", "12..13"}, "12 ranks do not fill hosts of 8 devices"},
           {{"--batch", "9223372036854775800"}, "The global batch is"},
           {{"--here", "--model", "gpt2-nano", "--seq", "64", "--batch", "4", "--scale", "2..4"},
            "--network"},
           {{"--here", "--device", "h100"}, "--device h100"},
           {{"--hardware", "/nowhere.json", "--hosts", "2"}, "--hosts is given"},
           {{"--hardware", "/nowhere.json", "--per-host", "2"}, "--per-host is given"},
           {{"--hardware", "/nowhere.json", "--device", "h100"}, "--device is given"},
           {{"--hardware", "/nowhere.json"}, "/nowhere.json"},
           {{"--hardware", training}, "`zero train --config` takes"},
           {{"--model", training}, "and no model. Give a model's config.json"},
           {{"--model", empty}, "is empty"}}) {
    const auto outcome = plan(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(says));
  }
  const auto deep = folder.write("deep.json", R"({"n_embd": 1600, "n_layer": 150, "n_head": 25})");
  const auto nothing = plan({"--model", deep, "--batch", "1", "--device", "rtx 4090", "--per-host",
                             "1", "--host-memory", "4GB", "--out", "/tmp/never.json"});
  EXPECT_EQ(nothing.status, 2) << nothing.out;
  EXPECT_THAT(nothing.err, HasSubstr("Nothing fits"));
}

// A product of the blocks of GPT-2: 6 x 8 x 1024 x 768 x 3072 FLOPs a layer, forward and backward.
TEST(Plan, PrintsWhatEachOperatorTakes) {
  const TemporaryFolder folder;
  const std::string json = folder / "operators.json";
  const auto outcome = plan({"--model", "gpt2", "--batch", "8", "--device", "h100", "--operators",
                             "--flops", "800T", "--bandwidth", "3TB/s", "--json", json});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("zero::softmax_cross_entropy_"));
  const auto file = nlohmann::json::parse(read_file(json));
  double products = 0;
  double update = 0;
  int fused = 0;
  for (const auto& row : file.at("results")) {
    const auto name = row.at("operator").get<std::string>();
    const double flops = row.at("flops");
    const double bytes = row.at("bytes");
    if (row.at("module") == "h.*.mlp.c_proj") products += flops;
    if (name == "zero::update_") update = bytes;
    if (name == "zero::linear_gelu_backward") {
      // It reads the gradient, the weight and GELU's arguments, and writes a gradient of the last
      // and of the bias: 2 bytes a number.
      constexpr double kRows = 8 * 1024;
      EXPECT_EQ(row.at("module"), "h.*.mlp.c_proj");
      EXPECT_EQ(flops, 12 * 2.0 * kRows * 768 * 3072);
      EXPECT_EQ(bytes, 12 * 2 * (kRows * (768 + 2 * 3072) + 768 * 3072 + 3072));
      ++fused;
    }
    // No row takes less than both of its bounds.
    const double least = std::max(flops / 800e12, bytes / 3e12) * 1e3;
    EXPECT_GE(row.at("ms").get<double>(), least * (1 - 1e-9)) << name;
  }
  EXPECT_GE(products, 12 * 6.0 * 8 * 1024 * 768 * 3072);
  EXPECT_NEAR(update / (28 * 124439808.0), 1, 1e-3);
  EXPECT_EQ(fused, 1);
  EXPECT_THAT(plan({"--flops", "800T"}).err, HasSubstr("--flops is of --operators"));
}

TEST(Plan, PrintsDevicesAndPapers) {
  EXPECT_THAT(plan({"--devices"}).out, HasSubstr("MI300X"));
  const auto papers = plan({"--papers"});
  EXPECT_EQ(papers.status, 0);
  EXPECT_THAT(papers.out, HasSubstr("ZeRO-Infinity, 512 GPUs"));
}

}  // namespace
}  // namespace zero::test
