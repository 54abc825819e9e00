// Names the rank or the host with which the trouble began, on every rank of every host, within
// seconds and also while nobody communicates.
//
// Note [Watch]
// Every process has one watch: a thread that sleeps in poll. Every watch has a TCP connection to
// the watches of two judges: rank 0, and the first rank of the second host, who steps in when rank
// 0 is gone. So
// - a process that dies is noticed at once, since the system closes its connections;
// - a process that is stopped, a host that is, and a link that is cut are noticed by the beats that
//   go both ways once a second, from this thread: a rank that computes for minutes is well;
// - no rank depends on another of its host to be seen, and the job's store is needed at the start
//   alone: it may go, and whoever hosts it.
// The judge says who was the first: his word is the verdict, which stands for ever and which all
// report. He tells the other judge before the rest, so that it is not lost with him; a judge does
// not go before the others have heard the verdict (but waits for them for a moment only). A rank
// that is in trouble itself reports to the judge and takes his verdict for its own. Where no judge
// is left, or this host is cut off from both, each rank says what it sees.
//
// A process that was stopped for so long that it was given up finds the verdict against it in its
// connections when it goes on, and reports the same. It accuses nobody of the time that it has
// missed itself.
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

/// What everybody reports.
struct Verdict {
  int origin = 0;         ///< the rank that it began with; of a host its first
  std::string message{};  ///< sentences: "Rank 9 (pid 4711, host b) died."
  bool operator==(const Verdict&) const = default;
};

class HostWatch {
 public:
  struct Settings {
    int rank = 0;
    int size = 1;
    Topology topology{};
    std::string address{};  ///< of this host, at which the other hosts reach it: "10.0.0.2"
    std::string host{};     ///< this host's name in messages; empty: as the system has it
    std::chrono::milliseconds beat{1000};
    /// Whoever is not heard of for as long is given up. At least 4 beats.
    std::chrono::milliseconds silence{4000};
    /// A rank that has not come to the watch after as long is named.
    std::chrono::milliseconds arrival{30'000};
    /// The most that `leave` waits for others.
    std::chrono::milliseconds linger{2000};
  };
  /// Called once, on the watch's thread, as soon as there is a verdict: aborts what this rank waits
  /// for. Must neither throw nor wait for a thread that calls `leave`; it may destroy the watch.
  using OnTrouble = std::function<void(const Verdict&)>;
  /// What this host knows by itself (a local rank that has died or failed), in the job's ranks.
  /// Called on the watch's thread twice a beat; must not block.
  using Look = std::function<std::optional<Verdict>()>;

  /// Meets the others' watches in `store`, which is not used afterwards. Collective, but that it
  /// returns once this rank is watched: the first thing to be done once all ranks have signed in.
  /// Throws CommError with the verdict where there is one meanwhile, and where a judge cannot be
  /// reached.
  HostWatch(Settings settings, c10d::Store& store, OnTrouble on_trouble, Look look = {});
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;
  /// `leave`; while an exception unwinds the stack, reports it first. In a forked child nothing.
  ~HostWatch();

  /// This rank is in trouble (`origin` is its own), or suspects `origin`, to whom a connection
  /// broke. Blocks until there is a verdict, which is this message or what came before it: half a
  /// second in which a suspicion waits for somebody who knows better, then as long as a message
  /// takes; at most until all judges are given up. Thread-safe.
  Verdict report(int origin, const std::string& message);
  /// What has been found, if anything. Thread-safe.
  std::optional<Verdict> verdict() const;
  /// Ends the watch in order: the others do not take it for a death. A judge stays for a moment
  /// until the others have left, or have heard the verdict. Joins the thread and closes all
  /// connections; later reports return themselves.
  void leave();

  /// "rank 9 (pid 4711, host b)", for this rank's own messages.
  std::string self() const;

 private:
  class Impl;
  OwnerProcess owner_;
  int exceptions_;
  std::shared_ptr<Impl> impl_;
};

}  // namespace zero::comm
