// A c10d backend for ranks on several hosts: shared memory inside a host, rails between them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "zero/base/owner_process.h"
#include "zero/comm/call_backend.h"
#include "zero/comm/call_work.h"
#include "zero/comm/group.h"
#include "zero/comm/hosts_collectives.h"
#include "zero/comm/hosts_place.h"

namespace zero::comm {

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
