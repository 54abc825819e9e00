// A backend's queue of collectives. They run in the order of their issue, on whichever thread is
// there first.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "zero/comm/flight.h"
#include "zero/comm/shm_collectives.h"

namespace zero::comm {

class CallQueue;

/// A call that has been issued; users of c10d wait on it.
class IssuedCall final : public c10d::Work, public KnowsItsEnd {
 public:
  IssuedCall(Call call, std::shared_ptr<CallQueue> queue);
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Blocks until the call has run, and helps with it and those before it. Ignores `timeout`: the
  /// call has its own.
  bool wait(std::chrono::milliseconds timeout) override;
  Call& call() { return call_; }
  int64_t ended() const override;

 private:
  friend class CallQueue;
  Call call_;
  std::shared_ptr<CallQueue> queue_;
  // this and the fields below are guarded by the queue's mutex
  c10::intrusive_ptr<IssuedCall> next_;
  bool finished_ = false;
  int64_t ended_ = 0;
  std::exception_ptr error_;
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

  /// Appends a call. With `wake` the worker, which is made on first need, runs it even if nobody
  /// waits for it.
  void push(c10::intrusive_ptr<IssuedCall> issued, bool wake);
  /// Blocks until `issued` has run.
  void finish(IssuedCall& issued);
  bool finished(const IssuedCall& issued) const;
  std::exception_ptr error(const IssuedCall& issued) const;
  int64_t ended(const IssuedCall& issued) const;
  /// Runs the remaining calls and ends the worker.
  void close();

 private:
  void run_front(std::unique_lock<std::mutex>& lock);
  void work();

  Run run_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<IssuedCall> head_;
  IssuedCall* tail_ = nullptr;
  bool running_ = false;  // a thread runs a call
  bool closing_ = false;
  std::thread worker_;
};

}  // namespace zero::comm
