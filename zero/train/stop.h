// A request to stop, by signal.
#pragma once

#include <csignal>
#include <cstddef>
#include <vector>

namespace zero::train {

/// While one of these lives, the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 (which batch systems send
/// before a time limit) only asks the training loop to stop after the step, sequence of a
/// validation or token of a sample that is under way. The second has its usual effect. A signal
/// that the process ignores (nohup, a shell's background jobs) stays ignored. A process may have
/// one at a time. Its main thread, which is the one that signals interrupt, must make and end it.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  /// Returns the signal that came, or 0.
  int received() const;

 private:
  std::vector<std::byte> stack_;  // of the handler
  stack_t stack_before_{};
  struct sigaction before_[4];
};

}  // namespace zero::train
