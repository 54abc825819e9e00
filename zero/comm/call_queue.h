// A backend's queue of collectives, which run in order, on whichever thread is there first.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "zero/comm/call_work.h"
#include "zero/comm/shm_collectives.h"

namespace zero::comm {

class CallQueue;

/// A call that has been issued; users of c10d wait on it.
class IssuedCall final : public CallWork {
 public:
  IssuedCall(Call call, std::shared_ptr<CallQueue> queue);
  /// Waits, and runs this call and those before it meanwhile.
  bool wait(std::chrono::milliseconds timeout) override;
  Call& call() { return call_; }

 private:
  friend class CallQueue;
  Call call_;
  std::shared_ptr<CallQueue> queue_;
  c10::intrusive_ptr<IssuedCall> next_;  // guarded by the signal's mutex
};

/// Runs calls one at a time, in order: on its worker thread, or on a thread that waits for one and
/// would sleep otherwise.
class CallQueue {
 public:
  using Run = std::function<std::exception_ptr(Call&)>;
  explicit CallQueue(Run run) : run_(std::move(run)) {}
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;
  ~CallQueue() { close(); }

  /// Appends a call. With `wake` the worker (made on first need) runs it even if nobody waits.
  void push(c10::intrusive_ptr<IssuedCall> issued, bool wake);
  /// Blocks until `issued` has run.
  void finish(IssuedCall& issued);
  const std::shared_ptr<Signal>& signal() const { return signal_; }
  /// Runs the remaining calls and ends the worker.
  void close();

 private:
  void run_front(std::unique_lock<std::mutex>& lock);
  void work();

  Run run_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();  // guards the queue
  c10::intrusive_ptr<IssuedCall> head_;
  IssuedCall* tail_ = nullptr;
  bool running_ = false;  // a thread runs a call
  bool closing_ = false;
  std::thread worker_;
};

}  // namespace zero::comm
