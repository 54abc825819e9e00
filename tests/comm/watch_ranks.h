// Ranks of virtual hosts on loopback. Each is a process with a watch and nothing else.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace zero::test {

class WatchedRanks {
 public:
  struct Result {
    int64_t at_ms = 0;  ///< the monotonic clock when it was told
    int told = 0;       ///< how often
    int origin = -1;
    std::string message;
  };

  /// Starts them, and lets them meet once all have started. `orders` are the ranks' first.
  WatchedRanks(int hosts, int ranks_a_host, std::vector<std::string> orders = {},
               std::chrono::milliseconds arrival = std::chrono::seconds(60));
  WatchedRanks(const WatchedRanks&) = delete;
  WatchedRanks& operator=(const WatchedRanks&) = delete;
  /// Kills those that still run.
  ~WatchedRanks();

  int size() const { return static_cast<int>(pids_.size()); }
  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  /// Blocks until all are watched; fails the test if that takes more than a minute.
  void wait_until_watched() const;
  /// See watch_worker.cpp.
  void order(int rank, const std::string& what) const;
  void signal(int rank, int number) const;
  /// Blocks until the rank has said what it heard; fails the test after `limit`.
  Result result(int rank, std::chrono::seconds limit = std::chrono::seconds(60)) const;
  /// Returns what it has said so far.
  std::optional<Result> result_now(int rank) const;
  /// Blocks until the process has ended: its exit status, or 128 + the signal; -1 after `limit`.
  int wait_for_end(int rank, std::chrono::seconds limit = std::chrono::seconds(30));

  static int64_t now_ms();

 private:
  std::string file(const char* what, int rank) const;
  zero::TemporaryFolder folder_;
  std::vector<pid_t> pids_;
  std::vector<int> status_;
};

}  // namespace zero::test
