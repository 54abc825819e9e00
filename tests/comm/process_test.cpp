// Ranks that are processes: correct results, and the survivors' errors when one is killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kNoticedWithinMs = 2000;

struct Result {
  int status = 0;       // the value of waitpid
  int64_t at_ms = 0;    // when the rank ended
  std::string message;  // "ok" or its error
};

struct Outcome {
  std::vector<Result> ranks;
  int64_t death_ms = 0;
};

Outcome run_ranks(const std::string& scenario, int size, int number = 0) {
  const zero::TemporaryFolder folder;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> words{COMM_WORKER,
                                   scenario,
                                   std::to_string(rank),
                                   std::to_string(size),
                                   folder.path().string(),
                                   std::to_string(number)};
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, COMM_WORKER, nullptr, nullptr, arguments.data(), environ), 0);
    pids.push_back(pid);
  }
  Outcome outcome;
  outcome.ranks.resize(static_cast<size_t>(size));
  // Rank 1 is fetched last: until then it is a zombie, and its peers must see that it is dead all
  // the same.
  for (int i = 0; i < size; ++i) {
    const auto rank = static_cast<size_t>((i + 2) % size);
    auto& result = outcome.ranks[rank];
    waitpid(pids[rank], &result.status, 0);
    std::ifstream file(folder.path() / ("result." + std::to_string(rank)));
    file >> result.at_ms;
    file.ignore();
    std::getline(file, result.message, '\0');
  }
  std::ifstream(folder.path() / "death") >> outcome.death_ms;
  return outcome;
}

void expect_survivors_name_rank_1(const Outcome& outcome, const std::string& detail) {
  EXPECT_TRUE(WIFSIGNALED(outcome.ranks[1].status) && WTERMSIG(outcome.ranks[1].status) == SIGKILL)
      << "rank 1 was to be killed: " << outcome.ranks[1].message;
  for (size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    if (rank == 1) continue;
    const auto& result = outcome.ranks[rank];
    EXPECT_TRUE(WIFEXITED(result.status) && WEXITSTATUS(result.status) == 3) << "rank " << rank;
    EXPECT_THAT(result.message, AllOf(AnyOf(HasSubstr("rank 1 (pid"), HasSubstr("Rank 1 (pid")),
                                      HasSubstr("died"), HasSubstr(detail)))
        << "rank " << rank;
    EXPECT_LT(result.at_ms - outcome.death_ms, kNoticedWithinMs) << "rank " << rank;
  }
}

TEST(Processes, RunCollectivesAndWindows) {
  for (const int size : {2, 4}) {
    for (const auto& result : run_ranks("correct", size).ranks) {
      EXPECT_EQ(result.message, "ok");
      EXPECT_TRUE(WIFEXITED(result.status) && WEXITSTATUS(result.status) == 0);
    }
  }
}

TEST(Processes, AreReportedWhenKilledInACollective) {
  for (const int delay : {0, 5}) {
    expect_survivors_name_rank_1(run_ranks("collective", 3, delay), "'unit 3'");
  }
}

TEST(Processes, AreReportedWhenKilledInTheAllocator) {
  for (const int delay : {0, 5}) {
    expect_survivors_name_rank_1(run_ranks("allocator", 3, delay), "'unit 4'");
  }
}

TEST(Processes, AreReportedWhenKilledBeforeTheyPublish) {
  expect_survivors_name_rank_1(run_ranks("window", 3), "'unit 5'");
}

TEST(Processes, AreReportedWhenKilledWhileTheGroupIsMade) {
  // The operations of the store are numbered: 1 counts this rank's groups, 2 posts its process, and
  // the rest follow. A rank that dies before it has posted its process is unknown; that is left to
  // the timeout.
  for (const int operation : {3, 5, 7}) {
    expect_survivors_name_rank_1(run_ranks("meeting", 3, operation), "");
  }
}

TEST(Processes, AreReportedWhenTheyLeaveByAnException) {
  const auto outcome = run_ranks("exception", 3);
  EXPECT_THAT(outcome.ranks[1].message, HasSubstr("rank 1 has no data"));
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_THAT(outcome.ranks[rank].message,
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("left because of an exception")));
  }
}

TEST(Processes, AreReportedWhenTheyExitWithoutAWord) {
  const auto outcome = run_ranks("exit", 3);
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_THAT(outcome.ranks[rank].message,
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("died"), HasSubstr("step 2")));
  }
}

}  // namespace
