// The other ranks of a shared-memory group, and how to wait for them.
//
// Note [Waiting]
// A rank sleeps on a futex in the slot of the peer that it waits for, and wakes at least every 100
// ms. It then looks if a peer has died (its pidfd becomes readable as soon as the process ends,
// even while it is a zombie), has left or has failed, and if the time is up. Ranks spin for some
// microseconds first, but only if every rank has a core of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/comm/arena.h"
#include "zero/comm/deadline.h"
#include "zero/comm/futex.h"
#include "zero/comm/peer_error.h"
#include "zero/comm/process.h"
#include "zero/comm/shm_control.h"

namespace zero::comm {

using Describe = std::function<std::string()>;

class Peers {
 public:
  /// `numbers` are the ranks' in their job, for messages; empty if they are the same.
  Peers(int rank, std::vector<Process> processes, std::vector<int> numbers = {});
  /// Lets this object know the ranks' states, which are in the memory.
  void attach(std::shared_ptr<Mapping> mapping);
  /// Returns the same ranks for another sequence of calls beside this one. To be called after
  /// `attach`.
  Peers on_channel(int channel) const;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(known_->processes.size()); }
  /// Returns the number of `rank` in the job.
  int number(int rank) const {
    return known_->numbers.empty() ? rank : known_->numbers[static_cast<size_t>(rank)];
  }
  /// Returns the slot of a rank's calls on this channel.
  RankSlot& slot(int rank) const;
  RankSlot& own() const { return slot(rank_); }
  /// Returns the slot, one for all channels, that says if a rank is there, active or gone.
  RankSlot& being(int rank) const;

  /// Blocks until `look` returns nothing. Until then `look` returns the value that it saw in the
  /// word at `word`; `peer` changes that word and wakes its sleepers. `doing` says what this rank
  /// is doing, for errors. Throws CommError (see Note [Waiting]).
  template <class Look>
  void wait(int peer, const void* word, Look look, Clock::time_point deadline,
            const Describe& doing) const {
    for (int i = 0; i < spins_; ++i) {
      if (!look()) return;
      pause();
    }
    auto next_check = Clock::now() + kCheckInterval;
    for (;;) {
      const std::optional<uint32_t> seen = look();
      if (!seen) return;
      futex_wait(word, *seen, kCheckInterval);
      if (!look()) return;
      const auto now = Clock::now();
      if (now < next_check && now < deadline && !troubled()) continue;
      next_check = now + kCheckInterval;
      auto trouble = find_trouble(peer);
      if (!look()) return;  // the peer did its part before it ended
      if (trouble) fail(*trouble, doing);
      if (now >= deadline) fail_timeout(peer, doing);
    }
  }

  struct Trouble {
    int origin = 0;  ///< its number in the job
    std::string message{};
  };
  /// Returns a rank that has died or failed, if there is one. Does not block.
  std::optional<Trouble> trouble() const { return find_trouble(std::nullopt); }

  /// Throws if a rank has failed. To be called after a wait, since such a peer may already reuse
  /// its memory.
  void check_failed(const Describe& doing) const;

  /// Gives this rank up because of `origin`, a rank of the job (often itself): every rank that
  /// waits, this one too, gets `message`. The first message stands.
  void post_failure(int origin, std::string_view message) const noexcept;
  /// Says that this rank is done with the group.
  void post_left() const noexcept;

  /// Returns "rank 2 (pid 4711, host h)".
  std::string who(int rank) const;
  /// Says what a rank was last seen doing.
  std::string last_seen(int rank) const;
  /// Returns the slot in which this rank shows what it does. To be called after `attach`.
  std::shared_ptr<ActivitySlot> own_activity() const;

 private:
  static constexpr std::chrono::milliseconds kCheckInterval{100};
  static void pause();
  bool troubled() const;
  void wake_waiters() const noexcept;
  std::optional<Trouble> find_trouble(std::optional<int> awaited) const;
  [[noreturn]] void fail(const Trouble& trouble, const Describe& doing) const;
  [[noreturn]] void fail_timeout(int awaited, const Describe& doing) const;

  /// The channels share this.
  struct Known {
    std::vector<Process> processes;
    std::vector<ProcessWatch> watches;
    std::vector<int> numbers;
    std::mutex posting;
  };

  int rank_;
  int channel_ = 0;
  std::shared_ptr<Known> known_ = std::make_shared<Known>();
  std::shared_ptr<Mapping> mapping_;
  int spins_ = 0;
};

}  // namespace zero::comm
