#include "zero/train/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "tests/support/run_program.h"
#include "zero/base/error.h"

namespace zero::train {
namespace {

using Json = nlohmann::json;

std::vector<Json> lines_of(const std::filesystem::path& path) {
  std::istringstream text(test::read_file(path));
  std::vector<Json> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(Json::parse(line));
  return lines;
}

class JsonlTest : public ::testing::Test {
 protected:
  test::TemporaryFolder folder_;
  const std::string path_ = folder_ / "log.jsonl";
};

TEST_F(JsonlTest, LossesReadBackBitExactly) {
  std::mt19937 random(1);
  std::vector<float> losses{0.1f, 1e-30f, 3.4028235e38f, 1.1754944e-38f, 1e-45f, 16777217.0f, 0.0f};
  for (int i = 0; i < 20000; ++i)
    losses.push_back(std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7f800000u)));
  {
    const auto monitor = jsonl_monitor(path_, false);
    for (const float loss : losses) monitor->step({.loss = loss});
  }
  std::istringstream text(test::read_file(path_));
  std::string line;
  for (const float loss : losses) {
    ASSERT_TRUE(std::getline(text, line));
    EXPECT_EQ(std::bit_cast<uint32_t>(Json::parse(line)["loss"].get<float>()),
              std::bit_cast<uint32_t>(loss))
        << line;
    const auto digits = line.substr(line.find("\"loss\":") + 7);
    EXPECT_EQ(std::strtof(digits.c_str(), nullptr), loss) << line;
  }
}

TEST_F(JsonlTest, WritesTheShortestDecimal) {
  jsonl_monitor(path_, false)->step({.loss = 0.1f});
  EXPECT_THAT(test::read_file(path_), ::testing::HasSubstr("\"loss\":0.1,"));
}

TEST_F(JsonlTest, WritesNullForWhatJsonCannotHold) {
  {
    const auto monitor = jsonl_monitor(path_, false);
    monitor->step({.loss = std::nanf(""), .grad_norm = std::numeric_limits<double>::infinity()});
  }
  const auto line = lines_of(path_).at(0);
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
}

TEST_F(JsonlTest, HasTheKeysThatScriptsRelyOn) {
  jsonl_monitor(path_, false)
      ->step({.step = 3,
              .loss = 2,
              .grad_norm = 1,
              .lr = 0.5,
              .step_ms = 10,
              .tokens_per_s = 100,
              .comm_ms = 4});
  const auto line = lines_of(path_).at(0);
  EXPECT_EQ(line["step"], 3);
  EXPECT_EQ(line["loss"], 2.0);
  EXPECT_EQ(line["grad_norm"], 1.0);
  EXPECT_EQ(line["lr"], 0.5);
  EXPECT_EQ(line["step_ms"], 10.0);
  EXPECT_EQ(line["tokens_per_s"], 100.0);
  EXPECT_EQ(line["comm_ms"], 4.0);
  EXPECT_FALSE(line.contains("skipped"));
}

TEST_F(JsonlTest, WritesMemoryAndTrafficByRankWithTheFormulaBeside) {
  RankMemory memory;
  memory.usage[static_cast<size_t>(Category::gradients)] = {10, 20};
  memory.gradients_formula = 30;
  RankTraffic traffic;
  traffic.counts[static_cast<size_t>(comm::Collective::all_gather)] = {4, 5, 6};
  traffic.all_gather_formula = 7;
  {
    const auto monitor = jsonl_monitor(path_, false);
    monitor->memory({RankMemory{}, memory});
    monitor->traffic({RankTraffic{}, traffic}, 9);
  }
  const auto lines = lines_of(path_);
  EXPECT_EQ(lines[0]["event"], "memory");
  EXPECT_EQ(lines[0]["per_rank"][1]["rank"], 1);
  EXPECT_EQ(lines[0]["per_rank"][1]["gradients"],
            Json({{"current", 10}, {"peak", 20}, {"formula", 30}}));
  EXPECT_EQ(lines[1]["event"], "traffic");
  EXPECT_EQ(lines[1]["steps"], 9);
  EXPECT_EQ(lines[1]["per_rank"][1]["all_gather"],
            Json({{"calls", 4}, {"logical_bytes", 5}, {"copied_bytes", 6}, {"formula", 7}}));
}

TEST_F(JsonlTest, TakesTextThatIsNotUtf8) {
  jsonl_monitor(path_, false)->sample("a", "b\xff\nc");
  EXPECT_EQ(lines_of(path_).at(0)["text"], "b\xef\xbf\xbd\nc");
}

TEST_F(JsonlTest, ContinuesAnEarlierLogWhereAsked) {
  jsonl_monitor(path_, false)->step({.step = 1});
  jsonl_monitor(path_, true)->step({.step = 2});
  EXPECT_EQ(lines_of(path_).size(), 2u);
  jsonl_monitor(path_, false)->step({.step = 1});
  EXPECT_EQ(lines_of(path_).size(), 1u);
}

TEST(Jsonl, NamesTheFileThatCannotBeWritten) {
  EXPECT_THROW(jsonl_monitor("/no/such/folder/log.jsonl", false), ConfigError);
  try {
    jsonl_monitor("/dev/full", true)->step({.step = 1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("/dev/full"),
                                               ::testing::HasSubstr("No space left")));
  }
}

}  // namespace
}  // namespace zero::train
