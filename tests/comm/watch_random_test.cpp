// Random failures of random jobs. WATCH_CASES is their number, WATCH_SEED the first one's seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/watch_ranks.h"

namespace zero::test {
namespace {

using std::chrono::milliseconds;

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

struct Outcome {
  std::string what;
  int64_t slowest_ms = 0;
};

Outcome run_case(int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int hosts = 2 + up_to(2), each = 1 + up_to(3), size = hosts * each;
  WatchedRanks ranks(hosts, each, {}, milliseconds(8000));
  const bool at_start = up_to(5) == 0;
  if (at_start) {
    std::this_thread::sleep_for(milliseconds(up_to(60)));
  } else {
    ranks.wait_until_watched();
    std::this_thread::sleep_for(milliseconds(up_to(800)));
  }
  static const std::vector<std::string> kKinds{"kill", "kill", "stop", "exit", "throw", "report"};
  std::set<int> lost;
  std::string what;
  const auto since = WatchedRanks::now_ms();
  for (int failures = 1 + up_to(2); failures > 0; --failures) {
    const int victim = up_to(size);
    if (!lost.insert(victim).second) continue;
    const auto& kind = kKinds[static_cast<size_t>(up_to(static_cast<int>(kKinds.size())))];
    what += (what.empty() ? "" : ", ") + kind + " " + std::to_string(victim);
    if (kind == "kill")
      ranks.signal(victim, SIGKILL);
    else if (kind == "stop")
      ranks.signal(victim, SIGSTOP);
    else if (kind == "report")
      ranks.order(victim, "report Rank " + std::to_string(victim) + " is tired.");
    else
      ranks.order(victim, kind);
    if (up_to(2) == 0) std::this_thread::sleep_for(milliseconds(up_to(40)));
  }
  Outcome outcome;
  outcome.what = std::to_string(hosts) + " x " + std::to_string(each) +
                 (at_start ? " at start: " : ": ") + what;
  std::map<std::string, std::vector<int>> messages;
  for (int rank = 0; rank < size; ++rank) {
    if (lost.contains(rank)) continue;
    const auto result = ranks.result(rank, std::chrono::seconds(40));
    messages[result.message].push_back(rank);
    if (result.at_ms > 0) outcome.slowest_ms = std::max(outcome.slowest_ms, result.at_ms - since);
    const bool named = std::any_of(lost.begin(), lost.end(), [&](int victim) {
      const auto name = "ank " + std::to_string(victim);
      const auto host = std::string("Host ") + static_cast<char>('a' + victim / each);
      return result.message.find(name) != std::string::npos ||
             result.message.find(host) != std::string::npos ||
             result.message.find("nothing was heard of") != std::string::npos ||
             result.message.find("heard nothing from") != std::string::npos;
    });
    EXPECT_TRUE(named) << "seed " << seed << ", " << outcome.what << ": rank " << rank << " says "
                       << result.message;
  }
  if (messages.size() > 1) {
    std::string all;
    for (const auto& [message, by] : messages)
      all += "\n  " + std::to_string(by.front()) + ": " + message;
    ADD_FAILURE() << "seed " << seed << ", " << outcome.what << ": the ranks differ:" << all;
  }
  if (!messages.empty()) outcome.what += " -> " + messages.begin()->first;
  for (const int victim : lost) ranks.signal(victim, SIGKILL);
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_GE(ranks.wait_for_end(rank), 0) << "seed " << seed << ": rank " << rank << " hangs";
  }
  return outcome;
}

TEST(RandomFailures, AreNamedTheSameEverywhere) {
  const int cases = number("WATCH_CASES", 12), first = number("WATCH_SEED", 1);
  std::atomic<int> next{0};
  std::mutex mutex;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = next++; n < cases; n = next++) {
        const auto outcome = run_case(first + n);
        const std::lock_guard lock(mutex);
        std::printf("%4d %6lld ms  %s\n", first + n, static_cast<long long>(outcome.slowest_ms),
                    outcome.what.c_str());
      }
    });
  }
}

}  // namespace
}  // namespace zero::test
