// `zero train --memory-copies` under `zero launch`: a run goes on from the hosts' memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/apps/train_run.h"
#include "zero/comm/rendezvous.h"

namespace zero::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kFromMemory = "from the copy in the hosts' memory";

class TrainCopies : public ::testing::Test {
 protected:
  /// The options of a run that keeps a copy every three steps, and no checkpoint.
  std::vector<std::string> words(const std::string& run,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"--steps",         "60",   "--stage",   "2",
                                 "--dtype",         "bf16", "--dropout", "0.1",
                                 "--memory-copies", "3",    "--out",     folder_.out(run)};
    for (size_t i = 0; i < more.size(); i += 2) {
      const auto given = std::find(all.begin(), all.end(), more[i]);
      if (given != all.end()) all.erase(given, given + 2);
    }
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// The weights of a run that nobody interrupts.
  void train_whole() {
    auto all = words("whole");
    all[9] = "0";
    ASSERT_EQ(folder_.train(all, "whole").status, 0);
  }
  /// Blocks until a copy of `step` or a later one is complete. Returns where copies lie on the
  /// first host.
  std::optional<fs::path> wait_for_copy(int64_t step, const std::string& run = "run") const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (std::chrono::steady_clock::now() < deadline) {
      for (const auto& line : folder_.log(run)) {
        if (line.value("event", "") == "memory_copy" && line["step"] >= step &&
            !line.contains("failure"))
          return line["path"].get<std::string>();
      }
      usleep(5000);
    }
    return std::nullopt;
  }
  void expect_whole(const std::string& run = "run") {
    EXPECT_EQ(folder_.losses("whole"), folder_.losses(run));
    EXPECT_TRUE(folder_.weights("whole") == folder_.weights(run));
  }
  static bool gone(const fs::path& folder) {
    for (int look = 0; look < 500 && fs::exists(folder); ++look) usleep(10000);
    return !fs::exists(folder);
  }
  TrainFolder folder_;
};

TEST_F(TrainCopies, ARankThatIsKilledCostsNoBitAndNoDisk) {
  train_whole();
  Program job(folder_.elastic("2", {}, words("run")));
  const auto memory = wait_for_copy(6);
  ASSERT_TRUE(memory) << job.err();
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGKILL);
  const auto outcome = job.wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("zero: restart 1 of 2 with 2 ranks"));
  EXPECT_THAT(outcome.out, HasSubstr(kFromMemory));
  expect_whole();
  EXPECT_TRUE(gone(memory->parent_path()));
}

TEST_F(TrainCopies, AHostThatIsLostCostsNoBitAndNoDisk) {
  train_whole();
  const auto port = std::to_string(comm::host_local_store(std::chrono::seconds(1)).port);
  const auto start = [&](const std::string& node) {
    return std::make_unique<Program>(
        folder_.elastic("1",
                        {"--nnodes", "2", "--node-rank", node, "--master-addr", comm::kLoopback,
                         "--master-port", port},
                        words("run")),
        std::map<std::string, std::string>{{"ZERO_HOST", "host" + node}});
  };
  const auto first = start("0");
  auto second = start("1");
  ASSERT_TRUE(wait_for_copy(6)) << first->err();
  second->signal(SIGKILL);  // with its rank, and what its host had in memory
  second = start("1");
  const auto outcome = first->wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(second->wait().status, 0);
  EXPECT_THAT(outcome.err, HasSubstr("zero: restart 1 of 2 with 2 ranks"));
  EXPECT_THAT(outcome.out, HasSubstr(kFromMemory));
  expect_whole();
}

TEST_F(TrainCopies, TheRanksThatAreLeftGoOnFromMemory) {
  Program job(folder_.elastic("2", {"--min-ranks", "1"}, words("run", {"--accumulate", "2"})));
  ASSERT_TRUE(wait_for_copy(6)) << job.err();
  kill(children_of(job.pid()).at(0), SIGKILL);
  const auto outcome = job.wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr(kFromMemory), HasSubstr("changed   ranks 2 -> 1")));
  EXPECT_EQ(folder_.steps().size(), 60u);
}

TEST_F(TrainCopies, ADamagedCopyIsNamedAndTheCheckpointTaken) {
  train_whole();
  for (const bool on_disk : {true, false}) {
    const std::string run = on_disk ? "disk" : "none";
    Program job(folder_.elastic(
        "2", {}, words(run, {"--save-every", on_disk ? "20" : "1000", "--memory-copies", "5"})));
    const auto memory = wait_for_copy(25, run);
    ASSERT_TRUE(memory) << job.err();
    const auto ranks = children_of(job.pid());
    for (const auto rank : ranks) kill(rank, SIGSTOP);
    for (const auto& copy : fs::directory_iterator(*memory)) {
      auto bytes = read_file(copy.path() / "rank-1-of-2.safetensors");
      if (bytes.empty()) continue;
      bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
      write_file(copy.path() / "rank-1-of-2.safetensors", bytes);
    }
    for (const auto rank : ranks) kill(rank, SIGKILL);
    const auto outcome = job.wait();
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    // Without a checkpoint the second restart begins anew.
    EXPECT_THAT(outcome.err, HasSubstr(fmt::format("restart {} of 2", on_disk ? 1 : 2)));
    EXPECT_THAT(outcome.out + outcome.err, HasSubstr("rank-1-of-2.safetensors' is damaged"));
    EXPECT_THAT(outcome.out, Not(HasSubstr(kFromMemory)));
    expect_whole(run);
  }
}

TEST_F(TrainCopies, TheNewerCheckpointWins) {
  // The only copy is of step 160, or of one soon after it.
  Program job(folder_.elastic(
      "1", {}, words("run", {"--steps", "300", "--save-every", "5", "--memory-copies", "160"})));
  ASSERT_TRUE(folder_.wait_for_step(200));
  kill(children_of(job.pid()).at(0), SIGKILL);
  const auto outcome = job.wait();
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("resumed   at step "), Not(HasSubstr(kFromMemory))));
}

TEST_F(TrainCopies, ACopyWithoutRoomIsNamedAndTheRunGoesOn) {
  train_whole();
  // The weights fit into a file, and a copy of the states does not.
  const auto weights = folder_.weights("whole");
  std::string line = fmt::format("ulimit -f {}; exec", weights.size() * 5 / 4 / 512);
  for (const auto& word : folder_.elastic("1", {}, words("run", {"--accumulate", "2"})))
    line += " '" + word + "'";
  const auto outcome = test::run({"sh", "-c", line});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("There is no copy in memory of step 3: Cannot write"),
                                 HasSubstr("File too large"),
                                 Not(HasSubstr("There is no copy in memory of step 6"))));
  EXPECT_EQ(folder_.steps().size(), 60u);
}

TEST_F(TrainCopies, NeedsALauncherThatOutlivesTheRanks) {
  const auto outcome = folder_.train(words("run"));
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("Start the run by zero launch --max-restarts"));
  const auto refused =
      test::run(folder_.elastic("1", {"--memory-folder", "/no/such"}, words("run")));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("/no/such"), HasSubstr("--memory-folder")));
}

TEST_F(TrainCopies, AFolderWhoseLauncherWasKilledGoes) {
  Program job(folder_.elastic("1", {}, words("run", {"--steps", "1000000"})));
  const auto memory = wait_for_copy(3);
  ASSERT_TRUE(memory) << job.err();
  ASSERT_TRUE(fs::exists(memory->parent_path()));
  job.signal(SIGKILL);
  EXPECT_TRUE(gone(memory->parent_path()));
}

}  // namespace
}  // namespace zero::test
