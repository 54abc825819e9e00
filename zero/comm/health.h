// Whether a rank's group still works; one failure ends it for good.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "zero/comm/peers.h"

namespace zero::comm {

/// Thread-safe. The first failure stands: it is told to the peers, and every later call throws it.
class Health {
 public:
  explicit Health(std::shared_ptr<Peers> peers) : peers_(std::move(peers)) {}
  /// Throws the failure, if there was one.
  void check() const;
  /// The failure, or null.
  std::exception_ptr failure() const;
  /// Records an exception that a call ended with.
  void fail(const std::exception_ptr& error) noexcept;
  /// This rank gives up of its own accord.
  void abandon(std::string_view why);

 private:
  std::shared_ptr<Peers> peers_;
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace zero::comm
