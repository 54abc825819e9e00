// Tells whether a group on several hosts still works.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "zero/comm/health.h"
#include "zero/comm/peer_error.h"
#include "zero/comm/rail.h"

namespace zero::comm {

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

}  // namespace zero::comm
