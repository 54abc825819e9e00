// The work of a call that a thread of a backend of ours runs.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "zero/comm/flight.h"

namespace zero::comm {

/// A mutex, and a condition that tells of changes to what the mutex guards.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
};

/// The work of a call. A user of c10d waits on it. It may outlive the backend.
class CallWork : public c10d::Work, public KnowsItsEnd {
 public:
  explicit CallWork(std::shared_ptr<Signal> signal) : signal_(std::move(signal)) {}
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Blocks until the call has run. Ignores `timeout`: the call has its own.
  bool wait(std::chrono::milliseconds timeout) override;
  int64_t ended() const override;
  /// Returns true once the call has run. The caller holds the signal's mutex.
  bool finished() const { return finished_; }
  /// Says that the call has run, and wakes all that wait. The caller holds the signal's mutex.
  void finish(std::exception_ptr error);

 private:
  std::shared_ptr<Signal> signal_;  // its mutex guards the fields below
  bool finished_ = false;
  int64_t ended_ = 0;
  std::exception_ptr error_;
};

}  // namespace zero::comm
