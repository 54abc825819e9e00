// A c10d backend for the small calls of ranks on several hosts.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "zero/comm/call_backend.h"
#include "zero/comm/hosts_place.h"

namespace zero::comm {

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

}  // namespace zero::comm
