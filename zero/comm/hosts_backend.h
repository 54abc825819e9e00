// A c10d backend for ranks on several hosts: shared memory inside a host, rails between them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "zero/base/owner_process.h"
#include "zero/comm/accounts.h"
#include "zero/comm/arena.h"
#include "zero/comm/call_backend.h"
#include "zero/comm/call_work.h"
#include "zero/comm/group.h"
#include "zero/comm/health.h"
#include "zero/comm/hosts_collectives.h"
#include "zero/comm/rail.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// The parts of a rank's group on several hosts.
struct HostsParts {
  Topology topology;
  /// the group's ranks by their numbers in the job, for messages; empty if those are the same
  std::vector<int> numbers{};
  std::shared_ptr<Rail> rail;
  /// The ranks of this host; without memory if it has one rank.
  Meeting local{};
  /// Tells all ranks that a rank is in trouble, and returns the job's first report of it, which may
  /// be another rank's. May be empty: then every host finds out by itself.
  std::function<PeerError(const PeerError& trouble)> report{};
  /// Something that `report` needs; it lives until both backends are gone. `report` does not hold
  /// it itself, since the watch's own thread may be the last to let go of `report`.
  std::shared_ptr<void> lasting{};
};

/// Tells if a rank's group still works; one failure ends it for good. Thread-safe.
class HostsHealth final : public Liveness {
 public:
  /// `rank` is this rank's number in the job.
  HostsHealth(int rank, std::shared_ptr<Rail> rail, std::shared_ptr<Health> local,
              std::function<PeerError(const PeerError& trouble)> report);
  /// Throws the failure, if there was one.
  void check() const;
  std::exception_ptr failure() const;
  bool failed() const override {
    return failure() != nullptr || (local_ != nullptr && local_->failed());
  }
  /// Records a call's error, tells everybody and aborts all calls. Returns the failure that stands.
  std::exception_ptr fail(const std::exception_ptr& error) noexcept;
  /// Records another rank's trouble, which all have been told already.
  void hear(const PeerError& trouble) noexcept;
  void abandon(std::string_view why) override;

 private:
  bool record(const std::exception_ptr& error) noexcept;
  void stop(const std::exception_ptr& error) noexcept;

  int rank_;
  std::shared_ptr<Rail> rail_;
  std::shared_ptr<Health> local_;
  std::function<PeerError(const PeerError& trouble)> report_;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

/// Holds the parts that both backends of a rank use, and leaves the group in order when it is
/// destroyed.
struct HostsPlace;

/// Runs collectives of tensors. Each call passes through two threads, one for each phase (Note [Two
/// phases]).
class HostsBackend final : public CallBackend {
 public:
  HostsBackend(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout);
  ~HostsBackend() override;
  const std::string getBackendName() const override { return "zero_hosts"; }
  void abort() override;

  /// Starts an all-gather whose output, (N * n), is one array of all ranks of this host.
  /// Asynchronous. Calls `then` once this rank has put the slices of the ranks at its place into
  /// it.
  c10::intrusive_ptr<c10d::Work> gather_to_host(const Published& what, std::function<void()> then);

 private:
  class Pending;
  /// A phase's queue and thread.
  struct Phase {
    std::deque<c10::intrusive_ptr<Pending>> calls;
    std::thread thread;
  };
  c10::intrusive_ptr<c10d::Work> issue(Call call, bool asynchronous, bool wake) override;
  void start_threads();
  void run_outward();
  void run_homeward();
  /// Waits for the next call. Returns null once there are no more.
  c10::intrusive_ptr<Pending> take(Phase& phase, const bool& last);
  std::exception_ptr run(const std::function<void()>& body) noexcept;
  void close();

  std::shared_ptr<HostsPlace> place_;
  HostsCollectives collectives_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();  // guards the phases
  Phase outward_;
  Phase homeward_;
  bool closing_ = false;         // no more calls are issued
  bool outward_closed_ = false;  // no more calls come to the second phase
  OwnerProcess owner_;
};

/// Runs scalars, checks and barriers on the calling thread, beside the tensors.
class HostsControl final : public CallBackend {
 public:
  HostsControl(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout);
  const std::string getBackendName() const override { return "zero_hosts_control"; }

 private:
  class Pending;
  c10::intrusive_ptr<c10d::Work> issue(Call call, bool asynchronous, bool wake) override;
  void run(Call call);

  std::shared_ptr<HostsPlace> place_;
  HostsCollectives collectives_;
  std::mutex mutex_;
};

/// The roles of a group on several hosts: data, control, memory and liveness.
struct HostsTransport {
  Transport transport;
  c10::intrusive_ptr<HostsBackend> data;  ///< the transport's `data`
  std::shared_ptr<HostsHealth> health;
  std::shared_ptr<Peers> local;  ///< the ranks of this host; null if it has one
};
HostsTransport hosts_transport(HostsParts parts, std::chrono::milliseconds timeout,
                               const Accounts& accounts);

}  // namespace zero::comm
