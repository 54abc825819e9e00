// Counts how long collectives take, by collective, ranks and size of their message.
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

/// The calls of one collective among equally many ranks with messages of one size.
struct CallTimes {
  Collective collective{};
  int ranks = 1;  ///< the ranks that take part: all, or those of a subgroup
  /// True for parameters that the ranks of a host read in place: nothing moves, and the time is
  /// spent waiting for the owners.
  bool in_place = false;
  /// The bytes of the whole array: with N ranks an all-gather's output, a reduce-scatter's input.
  int64_t message = 0;
  int64_t calls = 0;
  int64_t nanoseconds = 0;  ///< the sum of the times from call to end

  double total_ms() const { return static_cast<double>(nanoseconds) / 1e6; }
  double average_ms() const { return calls == 0 ? 0 : total_ms() / static_cast<double>(calls); }
  /// Returns the GB of the message in a second (10^9 bytes); 0 if nothing moves.
  double algorithm_bandwidth() const;
  /// Returns the GB in a second that a link of each of the N ranks carries at least: the message's
  /// times 2 (N-1)/N for an all-reduce, (N-1)/N for an all-gather, reduce-scatter and all-to-all, 1
  /// for a broadcast.
  double bus_bandwidth() const;
};

/// One call, as `verbose` reports it.
struct CallTime {
  Collective collective{};
  int ranks = 1;  ///< see CallTimes
  bool in_place = false;
  std::string_view label{};  ///< the caller's name for it (a unit)
  int64_t message = 0;
  int64_t nanoseconds = 0;
};

/// A log that is off costs a branch a call. Thread-safe, except `start`.
class CallLog {
 public:
  /// Counts calls from here on, or those for which `wanted` returns true. Calls `told`, which may
  /// be empty, with each call at its end, on the thread that has waited for it.
  void start(std::function<bool(Collective)> wanted = {},
             std::function<void(const CallTime&)> told = {});
  void stop() { on_ = false; }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(const CallTime& call);
  /// Returns the counts in ascending order of collective, size and ranks.
  std::vector<CallTimes> times() const;

 private:
  std::atomic<bool> on_{false};
  std::function<bool(Collective)> wanted_;
  std::function<void(const CallTime&)> told_;
  mutable std::mutex mutex_;
  std::map<std::tuple<Collective, bool, int64_t, int>, CallTimes> times_;
};

}  // namespace zero::comm
