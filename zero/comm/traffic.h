// The traffic ledger: calls and bytes by collective.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string_view>

namespace zero::comm {

enum class Collective : uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  control,  ///< scalars, checks and barriers
};
inline constexpr size_t kCollectives = 6;
std::string_view name(Collective collective);

/// Logical bytes are those that the collective sends per rank by definition, whatever the transport
/// does: with N ranks and a full buffer of S bytes, all-gather, reduce-scatter and all-to-all
/// (N-1)/N S, all-reduce 2 (N-1)/N S, broadcast S on the root and 0 elsewhere. Copied bytes are
/// those that were really copied or read for this rank, mostly by it; the count is complete once
/// the call's Work has been waited for. A transport that does not count copied bytes counts its
/// logical bytes as copied. Link bytes are all that this rank has sent to other hosts; there are
/// none if all ranks are on one host.
struct TrafficCount {
  int64_t calls = 0;
  int64_t logical_bytes = 0;
  int64_t copied_bytes = 0;
  int64_t link_bytes = 0;

  TrafficCount& operator+=(const TrafficCount& other);
  TrafficCount& operator-=(const TrafficCount& other);
};

class Traffic {
 public:
  /// Counts one call.
  void add(Collective collective, int64_t logical_bytes, int64_t copied_bytes);
  /// Counts bytes that a call which is already counted has copied.
  void add_copied(Collective collective, int64_t copied_bytes);
  /// Counts bytes of such a call that leave for another host.
  void add_link(Collective collective, int64_t link_bytes);
  TrafficCount count(Collective collective) const;
  /// Returns the sum over all collectives except control.
  TrafficCount total() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::array<TrafficCount, kCollectives> counts_{};
};

}  // namespace zero::comm
