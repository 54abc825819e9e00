// A request to stop, by signal.
#pragma once

#include <csignal>

namespace zero::train {

/// While one of these lives, the first SIGINT, SIGTERM or SIGHUP only asks the training loop to
/// stop after the step; the second has its usual effect. One at a time in a process.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  /// The signal that came, or 0.
  int received() const;

 private:
  struct sigaction before_[3];
};

}  // namespace zero::train
