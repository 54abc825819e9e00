// Updates of units on a thread of their own, beside the passes.
//
// Note [Updates beside]
// An update runs beside other work if that hides its time: in backward as gradients are reduced
// (Note [Update in backward] in update_schedule.h), in the forward pass that follows (Note [Update
// in forward]), or beside a whole step (Note [Delayed update]). Updates wait in a stack. Backward
// brings gradients in the order opposite to that in which the next forward pass reads the
// parameters, so the unit that came last is needed first. If the disk is too slow to update all
// units within backward, the updates that are left over are spread over the model: forward finds
// the units that it reaches first done, and the others on their way. A unit that somebody waits for
// goes before all others.
//
// While a unit is updated, the states of the next ones are read. So the order is bound some units
// ahead (`upcoming`).
#pragma once

#include <c10/core/thread_pool.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>

namespace zero {

/// Runs updates on one thread. Thread-safe.
class UpdateQueue {
 public:
  /// `idle` runs on the queue's thread whenever no update waits any more.
  explicit UpdateQueue(std::function<void()> idle);
  /// Waits for the update under way; those that wait never run.
  ~UpdateQueue();
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  /// Runs `update` of `unit`, for which no update waits, before those that wait already, unless
  /// `upcoming` has bound them. Throws the error of an earlier update.
  void push(int64_t unit, std::function<void()> update);
  /// Returns the unit whose update is the `index`-th after the one under way, and binds that
  /// choice; nothing if fewer wait. Only the queue's thread calls it.
  std::optional<int64_t> upcoming(int64_t index);

  /// Returns the number of updates that wait or are under way.
  int64_t size() const;
  /// Returns whether no update of `unit` waits or is under way.
  bool done(int64_t unit) const;
  /// Blocks until no update of `unit` waits or is under way. Throws the error of an update.
  void wait(int64_t unit);
  /// Blocks until fewer than `count` wait or are under way. Throws the error of an update.
  void wait_for_fewer(int64_t count);
  /// Blocks until no update is pending and `idle` has run. Throws the error of an update.
  void wait_all();

 private:
  struct Update {
    int64_t unit = 0;
    std::function<void()> run;
  };
  void run_next();
  // The caller of these holds the mutex.
  bool here(int64_t unit) const;
  int64_t pending() const;
  void rethrow() const;

  std::function<void()> idle_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Update> waiting_;  // the last is the next
  std::deque<Update> bound_;    // go before those, the first at first
  std::optional<int64_t> running_;
  bool busy_ = false;  // an update or `idle` runs, or is about to
  std::exception_ptr failure_;
  c10::ThreadPool thread_;  // one; the last member: it ends first
};

}  // namespace zero
