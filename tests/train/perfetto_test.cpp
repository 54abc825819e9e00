// The file of `zero train --profile`, read by Perfetto's own parser: by Node.js, in the folder of
// scripts/trace_environment.sh, or that of ZERO_TEST_TRACE_PROCESSOR. Without these the test is
// skipped, and says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tests/support/run_program.h"

namespace zero::train {
namespace {

using Json = nlohmann::json;

std::string processor() {
  if (const char* given = std::getenv("ZERO_TEST_TRACE_PROCESSOR")) return given;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::string caches = cache != nullptr  ? cache
                             : home != nullptr ? std::string(home) + "/.cache"
                                               : "";
  const auto path = caches + "/libzero/trace-processor";
  return std::filesystem::exists(path + "/trace_processor.wasm") ? path : "";
}

// Slices by process and row, and the bytes of each kind, as the file has them.
using Row = std::pair<std::string, std::string>;
std::map<Row, int64_t> slices_of(const Json& trace) {
  std::map<int64_t, std::string> processes;
  std::map<int64_t, std::string> threads;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
    if (event["name"] == "thread_name") threads[event["tid"]] = event["args"]["name"];
  }
  std::map<Row, int64_t> slices;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") ++slices[{processes.at(event["pid"]), threads.at(event["tid"])}];
  }
  return slices;
}

TEST(Perfetto, FindsEachSliceOfAProfileInItsRow) {
  const auto folder = processor();
  if (folder.empty() || test::run({"node", "--version"}).status != 0) {
    GTEST_SKIP() << "there is no Node.js, or no trace processor for it: run "
                    "scripts/trace_environment.sh, or set ZERO_TEST_TRACE_PROCESSOR to its folder";
  }
  const test::TemporaryFolder runs;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "a line to learn, number " + std::to_string(i % 10) + "\n";
  test::write_file(runs / "text.txt", text);
  const std::string file = runs / "step.json";
  const auto trained = test::run({ZERO_PROGRAM,
                                  "train",
                                  "--model",
                                  "gpt2-nano",
                                  "--data",
                                  runs / "text.txt",
                                  "--out",
                                  runs / "run",
                                  "--nproc",
                                  "2",
                                  "--stage",
                                  "3",
                                  "--steps",
                                  "3",
                                  "--seq",
                                  "16",
                                  "--micro-batch",
                                  "1",
                                  "--threads",
                                  "1",
                                  "--eval-tokens",
                                  "0",
                                  "--sample-tokens",
                                  "0",
                                  "--offload-optimizer",
                                  "nvme",
                                  "--nvme-path",
                                  runs.path().string(),
                                  "--profile",
                                  file});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto expected = slices_of(Json::parse(test::read_file(file)));
  const auto outcome =
      test::run({"node", std::string(ZERO_SOURCE) + "/tests/train/read_trace.js", folder, file});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto found = Json::parse(outcome.out);
  std::map<Row, int64_t> slices;
  for (const auto& row : found["rows"]) slices[{row[0], row[1]}] = row[2];
  EXPECT_EQ(slices, expected);
  EXPECT_EQ(found["errors"], Json::array());
  for (const auto* rank : {"rank 0", "rank 1"}) {
    for (const auto* row :
         {"compute", "gathers", "reductions", "updates", "disk reads", "disk writes", "control"})
      EXPECT_TRUE(slices.contains({rank, row})) << rank << ", " << row;
  }
  for (const auto& row : found["rows"]) {
    if (row[1] == "compute") {
      EXPECT_GE(row[4], 2) << "operators within operators within a phase";
    }
  }
}

}  // namespace
}  // namespace zero::train
