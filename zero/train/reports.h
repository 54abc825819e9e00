// The monitors of a run.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "zero/comm/agreement.h"
#include "zero/train/monitor.h"

namespace zero::train {

/// Passes reports to monitors, which only rank 0 has. The first failure of a monitor ends
/// reporting; the ranks learn of it at their next exchange.
class Reports {
 public:
  void add(std::unique_ptr<Monitor> monitor) { monitors_.push_back(std::move(monitor)); }

  void tell(const std::function<void(Monitor&)>& what) {
    if (failure_) return;
    try {
      tell_or_throw(what);
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  /// Passes on an exception of a monitor.
  void tell_or_throw(const std::function<void(Monitor&)>& what) {
    for (auto& monitor : monitors_) what(*monitor);
  }
  bool failed() const { return failure_ != nullptr; }
  /// Throws the failure on rank 0, and a comm::PeerFailure on the others. Collective.
  void share_failure(comm::Group& group) { comm::share_failure(group, "Reporting", failure_); }

 private:
  std::vector<std::unique_ptr<Monitor>> monitors_;
  std::exception_ptr failure_;
};

}  // namespace zero::train
