// `zero plan` as a user runs it: its configuration trains, its files are whole, bad input is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.h"

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
  const auto outcome = plan({"--model", "gpt2-nano", "--batch", "4", "--seq", "64", "--dtype",
                             "fp32", "--device", "epyc 9654", "--out", config, "--json", json});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("ZeRO is not needed"));
  const auto results = nlohmann::json::parse(read_file(json)).at("results");
  EXPECT_GT(results.size(), 4U);
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

TEST(Plan, NamesWhatItCannotUse) {
  for (const auto& [arguments, says] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--device", "h1000"}, "No device is known as 'h1000'"},
           {{"--batch", "7"}, "Give a multiple of 8"},
           {{"--seq", "4096"}, "at most 1024 tokens"},
           {{"--network", "0GB/s"}, "should be a number above 0"},
           {{"--scale", "9"}, "as 8..4096"},
           {{"--hardware", "/nowhere.json"}, "/nowhere.json"}}) {
    const auto outcome = plan(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(says));
  }
  const auto nothing =
      plan({"--model", "gpt2-xl", "--batch", "1", "--device", "rtx 4090", "--per-host", "1",
            "--host-memory", "4GB", "--out", "/tmp/never.json"});
  EXPECT_EQ(nothing.status, 2) << nothing.out;
  EXPECT_THAT(nothing.err, HasSubstr("Nothing fits"));
}

TEST(Plan, PrintsDevicesAndPapers) {
  EXPECT_THAT(plan({"--devices"}).out, HasSubstr("MI300X"));
  const auto papers = plan({"--papers"});
  EXPECT_EQ(papers.status, 0);
  EXPECT_THAT(papers.out, HasSubstr("ZeRO-Infinity, 512 GPUs"));
}

}  // namespace
}  // namespace zero::test
