// Tells whether a rank's group still works. One failure ends it for good.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "zero/comm/peers.h"
#include "zero/comm/transport.h"

namespace zero::comm {

/// A group's health on one host. The first failure stands: peers and later calls get it.
/// Thread-safe.
class Health final : public Liveness {
 public:
  explicit Health(std::shared_ptr<Peers> peers) : peers_(std::move(peers)) {}
  /// Throws the failure, if there was one.
  void check() const;
  std::exception_ptr failure() const;
  bool failed() const override { return failure() != nullptr || trouble().has_value(); }
  /// Records an exception that a call ended with.
  void fail(const std::exception_ptr& error) noexcept;
  void abandon(std::string_view why) override;
  /// Returns a rank that has died or failed, if there is one.
  std::optional<Peers::Trouble> trouble() const { return peers_->trouble(); }

 private:
  std::shared_ptr<Peers> peers_;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace zero::comm
