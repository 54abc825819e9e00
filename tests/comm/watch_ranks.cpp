#include "tests/comm/watch_ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

namespace zero::test {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

template <class Condition>
bool wait_for(seconds limit, const Condition& holds) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

}  // namespace

int64_t WatchedRanks::now_ms() {
  return std::chrono::duration_cast<milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

WatchedRanks::WatchedRanks(int hosts, int ranks_a_host, std::vector<std::string> orders,
                           milliseconds arrival) {
  const int size = hosts * ranks_a_host;
  for (size_t rank = 0; rank < orders.size(); ++rank) {
    if (!orders[rank].empty()) order(static_cast<int>(rank), orders[rank]);
  }
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> words{WATCH_WORKER,
                                   std::to_string(rank),
                                   std::to_string(size),
                                   std::to_string(ranks_a_host),
                                   folder_.path().string(),
                                   "127.0.0.1",
                                   std::to_string(arrival.count())};
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, WATCH_WORKER, nullptr, nullptr, arguments.data(), environ), 0);
    pids_.push_back(pid);
    status_.push_back(-1);
  }
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_TRUE(wait_for(seconds(60), [&] { return std::filesystem::exists(file("here", rank)); }))
        << "rank " << rank << " has not started";
  }
  std::ofstream(folder_ / "go") << std::flush;
}

WatchedRanks::~WatchedRanks() {
  for (int rank = 0; rank < size(); ++rank) {
    if (status_[static_cast<size_t>(rank)] >= 0) continue;
    kill(pid(rank), SIGKILL);
    waitpid(pid(rank), nullptr, 0);
  }
}

std::string WatchedRanks::file(const char* what, int rank) const {
  return (folder_.path() / (std::string(what) + "." + std::to_string(rank))).string();
}

void WatchedRanks::wait_until_watched() const {
  for (int rank = 0; rank < size(); ++rank) {
    ASSERT_TRUE(wait_for(seconds(60), [&] { return std::filesystem::exists(file("up", rank)); }))
        << "rank " << rank << " is not watched";
  }
}

void WatchedRanks::order(int rank, const std::string& what) const {
  std::ofstream(file("do", rank) + ".new") << what << std::flush;
  std::rename((file("do", rank) + ".new").c_str(), file("do", rank).c_str());
}

void WatchedRanks::signal(int rank, int number) const { kill(pid(rank), number); }

std::optional<WatchedRanks::Result> WatchedRanks::result_now(int rank) const {
  std::ifstream from(file("result", rank));
  Result result;
  if (!(from >> result.at_ms >> result.told >> result.origin)) return std::nullopt;
  from.ignore();
  std::getline(from, result.message, '\0');
  return result;
}

WatchedRanks::Result WatchedRanks::result(int rank, seconds limit) const {
  std::optional<Result> result;
  EXPECT_TRUE(wait_for(limit, [&] { return (result = result_now(rank)).has_value(); }))
      << "rank " << rank << " has heard nothing";
  return result.value_or(Result{});
}

int WatchedRanks::wait_for_end(int rank, seconds limit) {
  auto& status = status_[static_cast<size_t>(rank)];
  wait_for(limit, [&] {
    int word = 0;
    if (status < 0 && waitpid(pid(rank), &word, WNOHANG) == pid(rank)) {
      status = WIFSIGNALED(word) ? 128 + WTERMSIG(word) : WEXITSTATUS(word);
    }
    return status >= 0;
  });
  return status;
}

}  // namespace zero::test
