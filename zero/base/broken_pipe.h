// Keeps this process alive when a peer has gone.
#pragma once

#include <csignal>

namespace zero {

/// While a scope lives, a write of this thread to a socket or pipe that nobody reads any more fails
/// with EPIPE alone: the thread does not get SIGPIPE, which ends a program that does not handle it.
/// It is for libraries that write without MSG_NOSIGNAL. Threads that are started meanwhile inherit
/// this for their whole life.
class BrokenPipeScope {
 public:
  BrokenPipeScope() noexcept;
  /// Discards a signal that came meanwhile, and lets later ones through.
  ~BrokenPipeScope();
  BrokenPipeScope(const BrokenPipeScope&) = delete;
  BrokenPipeScope& operator=(const BrokenPipeScope&) = delete;

 private:
  sigset_t before_{};
  bool waited_ = false;  // a signal was pending before the scope, which leaves it alone
};

}  // namespace zero
