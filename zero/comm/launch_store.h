// The store in which the ranks and the launchers of a job meet.
//
// Note [Restarts]
// When a rank fails, its launcher ends the other ranks of its host. The ranks of other hosts find
// out by themselves and end too, so every launcher comes to the next attempt. There each one signs
// in. Node 0's launcher waits until all have, or until the patience is over, and says which nodes
// take part. A launcher that is not named, because its host was away or came late, waits for the
// attempt after that. A launcher whose ranks have done their work waits for those of the others: a
// rank may yet be killed at its exit. A launcher that is started anew finds that its node was here
// before, or that the job is at a later attempt, and waits in the same way. All attempts share the
// store, whose host is node 0: the job ends with it. Ranks meet afresh in each attempt (Note [Roll
// call] in rendezvous.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "zero/comm/launcher.h"

namespace zero::comm {

/// The place of this launcher's ranks in an attempt.
struct LaunchAttempt {
  int number = 0;
  int nproc = 1;  ///< ranks on each host
  int node = 0;   ///< this host's place among those that take part
  int nodes = 1;

  int first_rank() const { return node * nproc; }
  int world_size() const { return nodes * nproc; }
};

/// Node 0's launcher hosts it. `pause` sleeps a moment, and returns false where the user wants the
/// job to end.
class LaunchStore {
 public:
  /// Throws CommError.
  explicit LaunchStore(const LaunchOptions& options);
  const std::string& address() const { return address_; }
  uint16_t port() const { return port_; }
  /// Returns a random name of the job, the same for all launchers and attempts.
  const std::string& job() const { return job_; }

  /// Returns the first attempt at which this node may take part. A job without restarts has one.
  int first_attempt();
  /// Signs in for an attempt, and returns this node's place in it, or in a later one; none where
  /// the job has ended, or the user wants it to. Throws CommError where too few nodes have come.
  std::optional<LaunchAttempt> join(int attempt, const std::function<bool()>& pause);
  /// Returns whether the attempt cannot succeed, since the ranks of one of its launchers have
  /// ended. Ranks that have not met yet would wait long for them.
  bool doomed() const;
  /// Tells the other launchers that no restart would help.
  void refuse();

  /// Says that this launcher's ranks have done their work, and waits for those of the others.
  /// Returns false if ranks of another launcher have failed meanwhile: the next attempt needs this
  /// node again. Returns true at once in a job without restarts.
  bool all_done(const std::function<bool()>& pause);
  /// Says that this launcher's ranks have ended for good.
  void leave();
  /// Returns true if ranks of other hosts may still need the store that is hosted here.
  bool needed() const;

 private:
  std::optional<std::vector<int>> nodes_of(int attempt, const std::function<bool()>& pause);
  void name_nodes(int attempt, const std::function<bool()>& pause);
  std::vector<int> named(int attempt) const;
  std::string key(int attempt, const std::string& what) const;
  bool has(const std::string& key) const;

  const LaunchOptions& options_;
  std::string address_;
  uint16_t port_;
  bool hosted_here_;
  int nodes_;        // of the attempt
  int attempt_ = 0;  // the last one that this launcher took part in
  c10::intrusive_ptr<c10d::Store> store_;
  std::string job_;
};

}  // namespace zero::comm
