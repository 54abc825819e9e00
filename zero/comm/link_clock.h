// Accounts for the time of a rank's link to other hosts: busy, or still and why.
//
// Note [The link's time]
// At every moment the link is in one state, which the rank's calls and waits tell. A transport does
// not say when a message ends, except to a thread that waits for it. The states, the first that
// holds:
//
//   busy             A thread waits for bytes of a call that the peer has begun.
//   peer late        A thread waits for a peer's record of a call (HostsLinks::exchange_records),
//                    which the peer sends when it begins the call. Until then no byte of the call
//                    can move, either way.
//   busy             A thread waits until a message has left.
//   processor        A call is under way, but no thread waits for the link: its bytes are added,
//                    packed or copied, a thread does not get a processor, or another rank of this
//                    host has not come.
//   nothing to send  No call is under way.
//
// While a thread works on bytes that have arrived, further bytes of the call come in. Whether they
// did all the time shows when it asks for them: if it then has to wait, the link was busy during
// the work. If they are there, the link was ahead, and the processor held it up.
//
// A peer that has begun a call may then be slow to add or pack a chunk, or wait for another rank of
// its host. Where the link's speed is known (link_probe.h), a wait for a chunk is a busy link for
// at most twice the time that the chunk takes, since other channels have their share; after that
// the peer is late. The bytes that were sent, divided by the busy time, tell how full the link was.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "zero/base/owner_process.h"
#include "zero/comm/link_speed.h"
#include "zero/comm/link_times.h"

namespace zero::comm {

/// All groups of a rank share one. Thread-safe. A call or a wait costs two looks at the clock.
class LinkClock {
 public:
  enum class Wait : uint8_t { arrival, record, departure };

  /// A call is under way while one lives.
  class CallScope {
   public:
    explicit CallScope(LinkClock& clock) : clock_(clock) { clock_.count_call(1); }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;
    ~CallScope() { clock_.count_call(-1); }

   private:
    LinkClock& clock_;
  };

  /// A thread waits for the link while one lives.
  class WaitScope {
   public:
    /// `bytes`, if not 0, are those that the whole link carries while the ones arrive that the
    /// thread waits for.
    WaitScope(LinkClock& clock, Wait wait, int64_t bytes = 0)
        : clock_(clock), wait_(wait), bytes_(bytes), began_(clock.begin_wait(wait)) {}
    WaitScope(const WaitScope&) = delete;
    WaitScope& operator=(const WaitScope&) = delete;
    ~WaitScope() { clock_.end_wait(wait_, bytes_, began_); }

   private:
    LinkClock& clock_;
    Wait wait_;
    int64_t bytes_;
    std::chrono::steady_clock::time_point began_;
  };

  /// Returns the times since the clock was made.
  LinkTimes times();

  void set_speed(const LinkSpeed& speed);
  /// Returns the speed that was set, or null.
  std::optional<LinkSpeed> speed();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t { busy, nothing_to_send, processor, peer_late };

  void count_call(int more);  // nothing in a forked child
  Clock::time_point begin_wait(Wait wait);
  void end_wait(Wait wait, int64_t bytes, Clock::time_point began);

  // The caller holds the mutex for these.
  State state() const;
  Clock::time_point settle();  // counts the time until now
  int& waits(Wait wait) { return waits_[static_cast<size_t>(wait)]; }
  int waits(Wait wait) const { return waits_[static_cast<size_t>(wait)]; }
  Clock::duration longest(int64_t bytes) const;  // that they may take
  void move(State from, State to, Clock::duration time);
  Clock::duration& spent(State state) { return spent_[static_cast<size_t>(state)]; }

  OwnerProcess owner_;
  std::mutex mutex_;
  Clock::time_point settled_ = Clock::now();
  int calls_ = 0;                           // under way
  std::array<int, 3> waits_{};              // threads that wait, by Wait
  std::array<Clock::duration, 4> spent_{};  // by State
  Clock::duration worked_{};                // `processor` since the last wait for bytes or a record
  Clock::time_point told_ = settled_;       // when `times` was asked last
  std::array<Clock::duration, 4> told_spent_{};  // what was spent until then
  std::optional<LinkSpeed> speed_;
};

}  // namespace zero::comm
