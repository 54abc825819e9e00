#include "zero/engine/update_queue.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/parallel.h"

namespace zero {

UpdateQueue::UpdateQueue(std::function<void()> idle) : idle_(std::move(idle)), thread_(1) {}

UpdateQueue::~UpdateQueue() {
  const std::lock_guard lock(mutex_);
  waiting_.clear();
  bound_.clear();
}

void UpdateQueue::rethrow() const {
  if (failure_) std::rethrow_exception(failure_);
}

bool UpdateQueue::here(int64_t unit) const {
  const auto is = [&](const Update& update) { return update.unit == unit; };
  return running_ == unit || std::any_of(waiting_.begin(), waiting_.end(), is) ||
         std::any_of(bound_.begin(), bound_.end(), is);
}

void UpdateQueue::push(int64_t unit, std::function<void()> update) {
  {
    const std::lock_guard lock(mutex_);
    rethrow();
    ensure(!here(unit), "a unit is updated twice at once");
    waiting_.push_back({unit, std::move(update)});
    busy_ = true;
  }
  thread_.run([this] { run_next(); });
}

std::optional<int64_t> UpdateQueue::upcoming(int64_t index) {
  const std::lock_guard lock(mutex_);
  while (static_cast<int64_t>(bound_.size()) <= index && !waiting_.empty()) {
    bound_.push_back(std::move(waiting_.back()));
    waiting_.pop_back();
  }
  if (index >= static_cast<int64_t>(bound_.size())) return std::nullopt;
  return bound_[static_cast<size_t>(index)].unit;
}

// The thread calls this once for each update that was pushed.
void UpdateQueue::run_next() {
  Update update;
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || (bound_.empty() && waiting_.empty())) return;
    if (!bound_.empty()) {
      update = std::move(bound_.front());
      bound_.pop_front();
    } else {
      update = std::move(waiting_.back());
      waiting_.pop_back();
    }
    running_ = update.unit;
  }
  std::exception_ptr failure;
  const auto attempt = [&](const std::function<void()>& work) {
    if (failure) return;
    try {
      const c10::NoGradGuard no_grad;
      const OneThread alone;  // Note [One thread beside]
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  };
  attempt(update.run);
  update.run = {};  // frees what it holds before anybody is told
  std::unique_lock lock(mutex_);
  running_.reset();
  if (!failure && bound_.empty() && waiting_.empty()) {
    changed_.notify_all();
    lock.unlock();
    attempt(idle_);
    lock.lock();
    // If another update was pushed meanwhile, its call runs this again.
    busy_ = !failure && !waiting_.empty();
  }
  if (failure) {
    failure_ = failure;
    waiting_.clear();
    bound_.clear();
    busy_ = false;
  }
  changed_.notify_all();
}

int64_t UpdateQueue::pending() const {
  return static_cast<int64_t>(waiting_.size() + bound_.size()) + (running_ ? 1 : 0);
}

int64_t UpdateQueue::size() const {
  const std::lock_guard lock(mutex_);
  return pending();
}

bool UpdateQueue::done(int64_t unit) const {
  const std::lock_guard lock(mutex_);
  return !here(unit);
}

void UpdateQueue::wait(int64_t unit) {
  std::unique_lock lock(mutex_);
  const auto mine = std::find_if(waiting_.begin(), waiting_.end(),
                                 [&](const Update& update) { return update.unit == unit; });
  if (mine != waiting_.end()) std::rotate(mine, mine + 1, waiting_.end());
  changed_.wait(lock, [&] { return failure_ || !here(unit); });
  rethrow();
}

void UpdateQueue::wait_for_fewer(int64_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || pending() < count; });
  rethrow();
}

void UpdateQueue::wait_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || !busy_; });
  rethrow();
}

}  // namespace zero
