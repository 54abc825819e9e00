// The window of a group on several hosts: this host's window, into which all hosts' slices come.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "zero/comm/accounts.h"
#include "zero/comm/flight.h"
#include "zero/comm/group.h"
#include "zero/comm/hosts_backend.h"
#include "zero/comm/topology.h"

namespace zero::comm {

class HostsWindow final : public Window {
 public:
  /// `host` is the group of this host's ranks, `local` its window, `backend` that of all ranks.
  HostsWindow(std::shared_ptr<Group> host, std::unique_ptr<Window> local, int64_t slots,
              c10::intrusive_ptr<HostsBackend> backend, const Topology& topology,
              Accounts accounts);

  at::Tensor memory() override { return local_->memory(); }
  at::Tensor view() override { return local_->view(); }
  void discard() override { local_->discard(); }
  void publish(int64_t slot, uint64_t epoch, const Published& what) override;
  void settle() override;
  /// Waits for slices of rank (h, r); they come here through this host's rank r.
  void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) override;

 private:
  void await(int64_t slot);

  std::shared_ptr<Group> host_;
  std::shared_ptr<Window> local_;
  c10::intrusive_ptr<HostsBackend> backend_;
  Topology topology_;
  Accounts accounts_;
  struct Coming {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<Flight> flight;
  };
  std::mutex mutex_;            // several threads of a rank may use units that share a page
  std::vector<Coming> coming_;  // by slot: the calls that bring slices to this rank's place
};

}  // namespace zero::comm
