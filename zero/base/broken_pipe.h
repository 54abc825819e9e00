// A peer that has gone must not end this process.
#pragma once

#include <csignal>

namespace zero {

/// While a scope lives, a write of this thread to a socket or pipe that nobody reads any more fails
/// with EPIPE alone: the thread does not get SIGPIPE, which ends a program that does not handle it.
/// For libraries that write without MSG_NOSIGNAL. Threads that are started meanwhile inherit this
/// for their life.
class BrokenPipeScope {
 public:
  BrokenPipeScope() noexcept;
  /// Takes back a signal that came meanwhile, and lets later ones through.
  ~BrokenPipeScope();
  BrokenPipeScope(const BrokenPipeScope&) = delete;
  BrokenPipeScope& operator=(const BrokenPipeScope&) = delete;

 private:
  sigset_t before_{};
  bool waited_ = false;  // one was waiting before, which the scope leaves alone
};

}  // namespace zero
