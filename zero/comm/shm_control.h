// The control region of the shared-memory group: each rank tells the others what it does, without
// locks.
//
// Every word is a lock-free atomic, and so are the texts, so that a rank may read while another
// writes (a torn text can only spoil the wording of an error). A rank writes its own slot only,
// except for `claimed`. A rank that reads another's slot checks the values before it uses them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "zero/comm/activity.h"
#include "zero/comm/fixed_text.h"
#include "zero/comm/link_wire.h"
#include "zero/comm/shared_value.h"

namespace zero::comm {

enum class Op : uint8_t {
  none,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  barrier,
  window,  ///< the making of a Window
};
std::string_view name(Op op);

/// Returns 0 for no wire; different wires, whose messages differ, have different codes.
uint8_t wire_code(const std::optional<LinkWire>& wire);

/// A rank's call. Its peers compare it with theirs, and find the arrays by it.
struct CallRecord {
  uint64_t sequence = 0;  ///< 1 for the group's first collective
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  uint64_t digest = 0;          ///< the hash of that collective's record
  int64_t slice_distance = 0;   ///< between the beginnings of the slices of a sum's input
  int64_t data_offset = -1;     ///< the input's place in the file, or -1 if it is staged
  int64_t output_offset = -1;   ///< the output's place, or -1 if peers cannot write it
  int64_t staging_offset = -1;  ///< this rank's staging buffer, or -1 if it has none yet
  Op op = Op::none;
  Op within = Op::none;  ///< the collective of several hosts that this is a part of
  int8_t input_dtype = 0;
  int8_t output_dtype = 0;
  uint8_t wire = 0;  ///< `wire_code` of its wire between hosts
  int32_t root = 0;
  FixedText<72> label;

  /// Returns true if `other` is the same collective, with sizes, dtypes and label.
  bool matches(const CallRecord& other) const;
  /// Returns "reduce_scatter #45 'unit 3' (1024 -> 512 bytes, Float)".
  std::string describe() const;
};

/// Throws a CommError that lists who calls what. Rank `number(i)` of the job called `records[i]`;
/// rank `reporter` has seen that these do not match.
[[noreturn]] void refuse_mismatch(std::span<const CallRecord> records,
                                  const std::function<int(int)>& number, int reporter);

enum class RankState : uint32_t { active, left, failed };

/// Says why a rank gave up. The trouble began with the job's rank `origin`.
struct Failure {
  int64_t origin = -1;
  FixedText<2040> message;
};

struct alignas(64) RankSlot {
  std::atomic<uint32_t> joined{0};
  std::atomic<uint32_t> state{static_cast<uint32_t>(RankState::active)};
  std::atomic<uint64_t> started{0};              ///< sequence of the last call begun
  std::atomic<uint64_t> finished{0};             ///< the sequence of the last call finished
  SharedValue<Failure> failure;                  ///< to be read once `state` is failed
  std::array<SharedValue<CallRecord>, 2> calls;  ///< by the parity of their sequence
  ActivitySlot activity;                         ///< between calls
  /// The pieces of this rank's share of a reduction that somebody has begun; peers count too.
  alignas(64) std::atomic<int64_t> claimed{0};
  /// The synchronisation points passed. Peers sleep on it, so it has a cache line of its own.
  alignas(64) std::atomic<uint32_t> ticks{0};

  /// A word that is none of the three states means active; a rank that waits for this one will find
  /// out.
  RankState current_state() const {
    const auto word = state.load(std::memory_order_acquire);
    return word <= static_cast<uint32_t>(RankState::failed) ? static_cast<RankState>(word)
                                                            : RankState::active;
  }
  CallRecord last_call() const { return calls[started.load(std::memory_order_acquire) % 2].load(); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

/// The sequences of calls that ranks may run side by side; several hosts need three.
inline constexpr int kLocalChannels = 3;

constexpr int64_t control_bytes(int ranks) {
  return static_cast<int64_t>(sizeof(RankSlot)) * ranks * kLocalChannels;
}
constexpr int64_t slot_offset(int rank, int ranks, int channel) {
  return static_cast<int64_t>(sizeof(RankSlot)) * (channel * ranks + rank);
}

}  // namespace zero::comm
