// How long collectives take, by collective, ranks and size of their message.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <vector>

#include "zero/comm/traffic.h"

namespace zero::comm {

/// Calls of one kind among as many ranks, with messages of one size.
struct CallTimes {
  Collective collective{};
  int ranks = 1;  ///< that take part: all, or those of a subgroup
  /// Of parameters that the ranks of a host read where they are: nothing moves, and the time is
  /// that in which the owners were waited for.
  bool in_place = false;
  /// Bytes of the whole array: with N ranks an all-gather's output, a reduce-scatter's input.
  int64_t message = 0;
  int64_t calls = 0;
  int64_t nanoseconds = 0;  ///< from the call to its end, of all together

  double total_ms() const { return static_cast<double>(nanoseconds) / 1e6; }
  double average_ms() const { return calls == 0 ? 0 : total_ms() / static_cast<double>(calls); }
  /// GB/s of the message (10^9 bytes); 0 where nothing moves.
  double algorithm_bandwidth() const;
  /// GB/s that a link of each of the N ranks carries at least: the message's times 2 (N-1)/N for an
  /// all-reduce, (N-1)/N for an all-gather, reduce-scatter and all-to-all, 1 for a broadcast.
  double bus_bandwidth() const;
};

/// Of one call, as `verbose` tells it.
struct CallTime {
  Collective collective{};
  int ranks = 1;  ///< as in CallTimes
  bool in_place = false;
  std::string_view label{};  ///< of what it is (a unit's name)
  int64_t message = 0;
  int64_t nanoseconds = 0;
};

/// Off, it costs a branch a call. Thread-safe, but for `start`.
class CallLog {
 public:
  /// Counts calls from here on: those for which `wanted`, which may be empty, says so. `told`,
  /// which may be empty, is called with each at its end, on the thread that has waited for it.
  void start(std::function<bool(Collective)> wanted = {},
             std::function<void(const CallTime&)> told = {});
  void stop() { on_ = false; }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(const CallTime& call);
  /// By collective, then by size, then by ranks, ascending.
  std::vector<CallTimes> times() const;

 private:
  std::atomic<bool> on_{false};
  std::function<bool(Collective)> wanted_;
  std::function<void(const CallTime&)> told_;
  mutable std::mutex mutex_;
  std::map<std::tuple<Collective, bool, int64_t, int>, CallTimes> times_;
};

}  // namespace zero::comm
