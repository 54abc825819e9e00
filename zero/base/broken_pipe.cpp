#include "zero/base/broken_pipe.h"

#include <pthread.h>

#include <ctime>

namespace zero {

namespace {

sigset_t broken_pipe() {
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, SIGPIPE);
  return only;
}

bool waits() {
  sigset_t pending;
  return sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

BrokenPipeScope::BrokenPipeScope() noexcept : waited_(waits()) {
  const auto only = broken_pipe();
  pthread_sigmask(SIG_BLOCK, &only, &before_);
}

BrokenPipeScope::~BrokenPipeScope() {
  if (!waited_ && waits()) {
    const auto only = broken_pipe();
    const timespec now{};
    sigtimedwait(&only, nullptr, &now);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace zero
