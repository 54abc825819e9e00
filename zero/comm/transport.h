// A transport carries a group. It has six roles, and fills those that it can.
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
class LinkClock;
class Window;
struct Accounts;
struct GroupOptions;

/// Gives memory on which collectives work in place.
class Memory {
 public:
  virtual ~Memory() = default;
  /// See Group::empty.
  virtual at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) = 0;
};

/// Makes arrays that the ranks share.
class Windows {
 public:
  virtual ~Windows() = default;
  /// See Group::window.
  virtual std::unique_ptr<Window> make(int64_t bytes, int64_t slots, Category category) = 0;
};

/// Knows if the ranks are well, as they tell each other.
class Liveness {
 public:
  virtual ~Liveness() = default;
  /// Gives this rank up: its peers get a CommError with `why`, and so does every later call of its
  /// own.
  virtual void abandon(std::string_view why) = 0;
  /// Returns true if this rank knows that the group, or a rank of it, has failed. Does not block.
  virtual bool failed() const = 0;
};

/// Makes groups of some of the ranks.
class Subgroups {
 public:
  virtual ~Subgroups() = default;
  /// See Group::subgroup.
  virtual std::shared_ptr<Group> make(std::span<const int> ranks, const GroupOptions& options,
                                      const Accounts& accounts) = 0;
};

/// Says what a backend's next call is for, which c10d's interface has no room for.
struct Announcement {
  FixedText<72> label{};
  std::optional<Collective> counted{};  ///< its copied bytes are counted there
  bool awaited = false;  ///< its caller waits at once, so no other thread need be woken to run it
  std::optional<LinkWire> wire{};  ///< how its array crosses between hosts, if not as it is
};

/// Passes announcements from the group to a backend of ours. Thread-safe.
class Announcements {
 public:
  void announce(const Announcement& next) {
    const std::lock_guard lock(mutex_);
    next_ = next;
  }
  /// Returns the announcement, which serves one call, be that issued or refused.
  Announcement take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(next_, {});
  }

 private:
  std::mutex mutex_;
  Announcement next_;
};

/// The group replaces a role that is null: it has memory of its own, no windows, and does not tell
/// the peers. Without a backend it is a group of one.
struct Transport {
  c10::intrusive_ptr<c10d::Backend> data{};     ///< collectives of tensors
  c10::intrusive_ptr<c10d::Backend> control{};  ///< scalars, checks, barriers; null means `data`
  std::shared_ptr<Memory> memory{};
  std::shared_ptr<Windows> windows{};
  std::shared_ptr<Liveness> liveness{};
  std::shared_ptr<Subgroups> subgroups{};
  /// Makes a store in which the ranks can meet, under keys that nobody else uses. Collective.
  std::function<c10::intrusive_ptr<c10d::Store>()> store{};
  std::shared_ptr<ActivitySlot> activity{};  ///< here others see what this rank does
  /// Tells both backends (`control` alone if `data` is foreign) of their calls. They then count the
  /// bytes that they copy.
  std::shared_ptr<Announcements> announcements{};
  /// Says that `data` is another library's, as NCCL is, although `control` is libzero's own.
  bool foreign_data = false;
  /// Says which ranks share a host. If it is not set, all are on one host if the backends are
  /// libzero's own, else the ranks tell each other.
  std::optional<Topology> topology{};
  /// The device of the tensors that `data` carries; those of `control` are on the CPU.
  c10::Device device{c10::kCPU};
  /// This rank's number in its job, if it is another than in the group.
  std::optional<int> number{};
  /// Accounts for the time of this rank's link to other hosts; null if all are on one host, or
  /// another library has the link.
  std::shared_ptr<LinkClock> link{};
};

}  // namespace zero::comm
