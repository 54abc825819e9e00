// What carries a group: six roles, of which a transport fills those that it can.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "zero/base/ledger.h"
#include "zero/comm/activity.h"
#include "zero/comm/fixed_text.h"
#include "zero/comm/link_wire.h"
#include "zero/comm/topology.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

class Group;
class Window;
struct Accounts;
struct GroupOptions;

/// Memory on which collectives work in place.
class Memory {
 public:
  virtual ~Memory() = default;
  /// See Group::empty.
  virtual at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) = 0;
};

/// Arrays that the ranks share.
class Windows {
 public:
  virtual ~Windows() = default;
  /// See Group::window.
  virtual std::unique_ptr<Window> make(int64_t bytes, int64_t slots, Category category) = 0;
};

/// Whether the ranks are well, as they tell each other.
class Liveness {
 public:
  virtual ~Liveness() = default;
  /// This rank gives up: its peers get a CommError with `why`, and so does every later call of its
  /// own.
  virtual void abandon(std::string_view why) = 0;
  /// Whether the group has failed, or a rank of it, as far as is known here. Does not block.
  virtual bool failed() const = 0;
};

/// Groups of some of the ranks.
class Subgroups {
 public:
  virtual ~Subgroups() = default;
  /// See Group::subgroup.
  virtual std::shared_ptr<Group> make(std::span<const int> ranks, const GroupOptions& options,
                                      const Accounts& accounts) = 0;
};

/// What a backend's next call is for, which c10d's interface does not say.
struct Announcement {
  FixedText<72> label{};
  std::optional<Collective> counted{};  ///< where its copied bytes are counted
  bool awaited = false;  ///< by its caller at once: no other thread need be woken to run it
  std::optional<LinkWire> wire{};  ///< of what crosses between hosts, where not its own dtype
};

/// From the group to a backend of ours. Thread-safe.
class Announcements {
 public:
  void announce(const Announcement& next) {
    const std::lock_guard lock(mutex_);
    next_ = next;
  }
  /// It serves one call, be that issued or refused.
  Announcement take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(next_, {});
  }

 private:
  std::mutex mutex_;
  Announcement next_;
};

/// A role that is null is left to the group: memory of its own, no windows, no word to the peers.
/// Without a backend it is a group of one.
struct Transport {
  c10::intrusive_ptr<c10d::Backend> data{};     ///< collectives of tensors
  c10::intrusive_ptr<c10d::Backend> control{};  ///< scalars, checks, barriers; null: as `data`
  std::shared_ptr<Memory> memory{};
  std::shared_ptr<Windows> windows{};
  std::shared_ptr<Liveness> liveness{};
  std::shared_ptr<Subgroups> subgroups{};
  /// Where the ranks can meet, under keys that nobody else uses; called by all of them together.
  std::function<c10::intrusive_ptr<c10d::Store>()> store{};
  std::shared_ptr<ActivitySlot> activity{};  ///< where others see what this rank does
  /// Of both backends (of `control` alone where `device` is not the CPU), which then count the
  /// bytes that they copy.
  std::shared_ptr<Announcements> announcements{};
  /// Where the ranks are; null: all on one host if the backends are libzero's own, else they tell
  /// each other.
  std::optional<Topology> topology{};
  /// Of the tensors that `data` carries; those of `control` are the CPU's.
  c10::Device device{c10::kCPU};
  /// What this rank is among the ranks of its job; null: the same as in the group.
  std::optional<int> number{};
};

}  // namespace zero::comm
