#include "zero/train/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
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
  EXPECT_FALSE(line.contains("loss_scale"));
}

TEST_F(JsonlTest, WritesTheLossScaleOfAStep) {
  jsonl_monitor(path_, false)
      ->step({.step = 1, .skipped = true, .loss_scale = 65536, .next_loss_scale = 32768});
  const auto line = lines_of(path_).at(0);
  EXPECT_EQ(line["skipped"], true);
  EXPECT_EQ(line["loss_scale"], 65536);
}

TEST_F(JsonlTest, WritesMemoryAndTrafficByRankWithTheFormulaBeside) {
  RankMemory memory;
  memory.usage[static_cast<size_t>(Category::gradients)] = {10, 20};
  memory.formula[static_cast<size_t>(Category::gradients)] = 30;
  RankTraffic traffic;
  traffic.counts[static_cast<size_t>(comm::Collective::all_gather)] = {4, 5, 6};
  traffic.formula[static_cast<size_t>(comm::Collective::all_gather)] = 7;
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

RankTraffic traffic_of_two_hosts() {
  RankTraffic traffic;
  traffic.hosts = 2;
  traffic.counts[static_cast<size_t>(comm::Collective::all_gather)] = {1, 10, 4096, 2048};
  traffic.counts[static_cast<size_t>(comm::Collective::reduce_scatter)] = {1, 20, 1024, 8192};
  traffic.counts[static_cast<size_t>(comm::Collective::control)] = {1, 30, 512, 256};
  traffic.link_formula[static_cast<size_t>(comm::Collective::all_gather)] = 3072;
  traffic.link_formula[static_cast<size_t>(comm::Collective::reduce_scatter)] = 1024;
  traffic.link = {.busy = 4, .nothing_to_send = 3, .processor = 2, .peer_late = 1};
  return traffic;
}

TEST_F(JsonlTest, TellsHowFastTheLinkIs) {
  RunInfo info;
  info.config_json = "{}";
  info.link = comm::LinkSpeed{.bandwidth = 125e6, .latency = 0.25e-3};
  jsonl_monitor(path_, false)->begin(info);
  EXPECT_EQ(lines_of(path_).at(1),
            Json({{"event", "link"}, {"bytes_per_s", 125e6}, {"latency_ms", 0.25}}));
}

TEST_F(JsonlTest, TellsWhatCrossesBetweenHostsWhereThereAreSeveral) {
  {
    const auto monitor = jsonl_monitor(path_, false);
    monitor->traffic({traffic_of_two_hosts()}, 1);
    monitor->traffic({RankTraffic{}}, 1);
  }
  const auto lines = lines_of(path_);
  const auto& of_two = lines[0]["per_rank"][0];
  EXPECT_EQ(of_two["all_gather"], Json({{"calls", 1},
                                        {"logical_bytes", 10},
                                        {"copied_bytes", 4096},
                                        {"link_bytes", 2048},
                                        {"link_formula", 3072}}));
  EXPECT_EQ(of_two["control"]["link_bytes"], 256);
  EXPECT_EQ(of_two["link"], Json({{"busy_ms", 4.0},
                                  {"nothing_to_send_ms", 3.0},
                                  {"processor_ms", 2.0},
                                  {"peer_late_ms", 1.0}}));
  EXPECT_FALSE(of_two["control"].contains("link_formula"));
  const auto& of_one = lines[1]["per_rank"][0];
  EXPECT_FALSE(of_one["all_gather"].contains("link_bytes"));
  EXPECT_FALSE(of_one["all_gather"].contains("link_formula"));
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

/// Returns what `body` writes to stdout, which is a terminal meanwhile.
std::string on_a_terminal(const std::function<void()>& body) {
  int terminal = -1, program = -1;
  EXPECT_EQ(openpty(&terminal, &program, nullptr, nullptr, nullptr), 0);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(program, STDOUT_FILENO);
  body();
  std::fflush(stdout);
  dup2(before, STDOUT_FILENO);
  close(before);
  close(program);
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(terminal, buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<size_t>(got));
  close(terminal);
  return text;
}

TEST(Console, ClearsItsProgressBarWhenItEnds) {
  const auto text = on_a_terminal([] {
    const auto monitor = console_monitor(1);
    RunInfo run;
    run.steps = 100;
    monitor->begin(run);
    monitor->step({.step = 1, .step_ms = 1});
  });
  const auto bar = text.rfind("step 1 of 100");
  ASSERT_NE(bar, std::string::npos) << text;
  const auto line = text.find_first_of("\r\n", bar);
  ASSERT_NE(line, std::string::npos) << "the next message would stand behind the bar";
  EXPECT_EQ(text.substr(line), "\r\033[K");
}

TEST(Console, GivesATerminalNothingButText) {
  const auto shown = [](const std::string& text) {
    testing::internal::CaptureStdout();
    console_monitor(1)->sample("> ", text);
    return testing::internal::GetCapturedStdout();
  };
  const std::string text = "caf\xc3\xa9\t\xe2\x82\xac \xf0\x9f\x99\x82\n";
  EXPECT_EQ(shown(text), "\nsample\n> " + text + "\n");
  EXPECT_EQ(shown("a\x1b[2J\x07\r\x7f"), "\nsample\n> a\\x1b[2J\\x07\\x0d\\x7f\n");
  EXPECT_EQ(shown("\xff\xe2\x82 z\xc3"), "\nsample\n> \\xff\\xe2\\x82 z\\xc3\n");
  EXPECT_EQ(shown("\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80"),
            "\nsample\n> \\xc0\\xaf\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80\n");
  EXPECT_EQ(shown("\xc2\x9b"), "\nsample\n> \\xc2\\x9b\n") << "a control sequence in eight bits";
}

TEST(Console, ShowsWhatCrossesBetweenHostsWhereThereAreSeveral) {
  const auto shown = [](const RankTraffic& traffic) {
    testing::internal::CaptureStdout();
    console_monitor(1)->traffic({traffic, traffic}, 2);
    std::fflush(stdout);
    return testing::internal::GetCapturedStdout();
  };
  auto of_one = traffic_of_two_hosts();
  of_one.hosts = 1;
  of_one.link.reset();
  const auto before = shown(of_one);
  EXPECT_THAT(before, ::testing::Not(::testing::HasSubstr("between hosts")));
  const auto text = shown(traffic_of_two_hosts());
  EXPECT_EQ(text.substr(0, before.size()), before);
  EXPECT_EQ(text.substr(before.size()),
            "\ntraffic a step by link, bytes (formula beside)\n"
            "  rank  inside hosts              between hosts\n"
            "     0      2.50 KiB      5.00 KiB   (2.00 KiB)\n"
            "     1      2.50 KiB      5.00 KiB   (2.00 KiB)\n"
            "\nlink between hosts, ms a step\n"
            "  rank             busy  nothing to send   processor busy        peer late       "
            "busy, MB/s\n"
            "     0              2.0              1.5              1.0              0.5            "
            "  2.6\n"
            "     1              2.0              1.5              1.0              0.5            "
            "  2.6\n");
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
