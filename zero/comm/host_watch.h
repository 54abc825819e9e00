// Names the rank or the host with which the trouble began, on every rank of every host, within
// seconds, even while nobody communicates.
//
// Note [Watch]
// Every process has one watch: a thread that sleeps in poll. Every watch has a TCP connection to
// the watches of two judges: rank 0, and the first rank of the second host, which steps in when
// rank 0 is gone. So
// - the death of a process is noticed at once, since the system closes its connections;
// - a process or a host that stops, and a link that is cut, are noticed by the beats that watches
//   send each other once a second; a rank that computes for minutes still beats;
// - no rank depends on another of its host to be seen, and the job's store is needed at the start
//   alone: it may go, and so may its process.
// The judge decides which rank was the first in trouble. This verdict stands for ever, and all
// ranks report it. The judge tells the other judge before the rest, so that the verdict is not lost
// with it. A judge does not go before the others have heard the verdict (but waits for them for a
// moment only). A rank that is in trouble itself reports to the judge and takes the judge's verdict
// for its own. If no judge is left, or this host is cut off from both, each rank reports what it
// sees.
//
// A process may be stopped for so long that the others give it up. When it goes on, it finds the
// verdict against it in its connections, and reports the same. It accuses nobody because of the
// time that it has missed itself.
//
// A forked child that lives on without exec keeps its parent's connections open: the parent's death
// is then noticed by `look`, or by its silence.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "zero/base/owner_process.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// The cause that all ranks report.
struct Verdict {
  int origin = 0;         ///< the rank, or the first rank of the host, where the trouble began
  std::string message{};  ///< sentences: "Rank 9 (pid 4711, host b) died."
  bool operator==(const Verdict&) const = default;
};

class HostWatch {
 public:
  struct Settings {
    int rank = 0;
    int size = 1;
    Topology topology{};
    std::string address{};  ///< this host's address, at which the other hosts reach it: "10.0.0.2"
    std::string host{};     ///< this host's name in messages; empty for the system's
    std::chrono::milliseconds beat{1000};
    /// A rank that nobody has heard for so long is given up. At least 4 beats.
    std::chrono::milliseconds silence{4000};
    /// A rank that has not come to the watch after so long is named.
    std::chrono::milliseconds arrival{30'000};
    /// `leave` waits for others at most for so long.
    std::chrono::milliseconds linger{2000};
  };
  /// Called once, on the watch's thread, as soon as there is a verdict, to abort what this rank
  /// waits for. Must neither throw nor wait for a thread that calls `leave`; it may destroy the
  /// watch.
  using OnTrouble = std::function<void(const Verdict&)>;
  /// Returns what this host knows by itself: a local rank that has died or failed, by its number in
  /// the job. Called on the watch's thread twice a beat; must not block.
  using Look = std::function<std::optional<Verdict>()>;

  /// Meets the others' watches in `store`, which is not used afterwards. Collective, but it returns
  /// once this rank is watched. To be made as soon as all ranks have signed in. Throws CommError
  /// with the verdict if there is one meanwhile, and if a judge cannot be reached.
  HostWatch(Settings settings, c10d::Store& store, OnTrouble on_trouble, Look look = {});
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;
  /// Calls `leave`; while an exception unwinds the stack, reports that first. In a forked child it
  /// does nothing.
  ~HostWatch();

  /// Says that this rank is in trouble (`origin` is its own number), or that it suspects `origin`
  /// because a connection to it broke. Blocks until there is a verdict, and returns it: this
  /// message, or one that came before. That takes half a second in which a suspicion waits for a
  /// rank that knows better, and then as long as a message takes; at most until all judges are
  /// given up. Thread-safe.
  Verdict report(int origin, const std::string& message);
  /// Returns the verdict, if there is one. Thread-safe.
  std::optional<Verdict> verdict() const;
  /// Ends the watch in order, so that the others do not take the end for a death. A judge stays for
  /// a moment until the others have left, or have heard the verdict. Joins the thread and closes
  /// all connections. A later report returns its own message.
  void leave();

  /// Returns "rank 9 (pid 4711, host b)", for this rank's own messages.
  std::string self() const;

 private:
  class Impl;
  OwnerProcess owner_;
  int exceptions_;
  std::shared_ptr<Impl> impl_;
};

}  // namespace zero::comm
