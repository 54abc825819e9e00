#include "zero/comm/call_queue.h"

#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/thread.h"

namespace zero::comm {

IssuedCall::IssuedCall(Call call, std::shared_ptr<CallQueue> queue)
    : call_(std::move(call)), queue_(std::move(queue)) {}

bool IssuedCall::isCompleted() { return queue_->finished(*this); }

bool IssuedCall::isSuccess() const { return queue_->finished(*this) && !queue_->error(*this); }

std::exception_ptr IssuedCall::exception() const { return queue_->error(*this); }

int64_t IssuedCall::ended() const { return queue_->ended(*this); }

bool IssuedCall::wait(std::chrono::milliseconds /*timeout*/) {
  queue_->finish(*this);
  if (const auto error = queue_->error(*this)) std::rethrow_exception(error);
  return true;
}

void CallQueue::push(c10::intrusive_ptr<IssuedCall> issued, bool wake) {
  const std::lock_guard lock(mutex_);
  if (wake && !worker_.joinable()) {
    worker_ = start_thread<CommError>("a rank's collectives", [this] { work(); });
  }
  auto* last = issued.get();
  (tail_ == nullptr ? head_ : tail_->next_) = std::move(issued);
  tail_ = last;
  if (wake) changed_.notify_all();
}

void CallQueue::run_front(std::unique_lock<std::mutex>& lock) {
  const auto issued = std::move(head_);
  head_ = std::move(issued->next_);
  if (!head_) tail_ = nullptr;
  running_ = true;
  lock.unlock();
  auto error = run_(issued->call_);
  // Releases the tensors as soon as the call is done; the last Work may live for long.
  issued->call_.input.reset();
  issued->call_.output.reset();
  const auto now = Timeline::now();
  lock.lock();
  running_ = false;
  issued->finished_ = true;
  issued->ended_ = now;
  issued->error_ = std::move(error);
  changed_.notify_all();
}

void CallQueue::finish(IssuedCall& issued) {
  std::unique_lock lock(mutex_);
  while (!issued.finished_) {
    if (!running_ && head_) {
      run_front(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

bool CallQueue::finished(const IssuedCall& issued) const {
  const std::lock_guard lock(mutex_);
  return issued.finished_;
}

std::exception_ptr CallQueue::error(const IssuedCall& issued) const {
  const std::lock_guard lock(mutex_);
  return issued.error_;
}

int64_t CallQueue::ended(const IssuedCall& issued) const {
  const std::lock_guard lock(mutex_);
  return issued.ended_;
}

void CallQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!running_ && head_) {
      run_front(lock);
    } else if (closing_ && !head_) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void CallQueue::close() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    while (running_ || head_) {
      if (!running_) {
        run_front(lock);
      } else {
        changed_.wait(lock);
      }
    }
  }
  if (worker_.joinable()) worker_.join();
}

}  // namespace zero::comm
