#include "zero/comm/call_queue.h"

#include <memory>
#include <mutex>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/thread.h"

namespace zero::comm {

IssuedCall::IssuedCall(Call call, std::shared_ptr<CallQueue> queue)
    : CallWork(queue->signal()), call_(std::move(call)), queue_(std::move(queue)) {}

bool IssuedCall::wait(std::chrono::milliseconds timeout) {
  queue_->finish(*this);
  return CallWork::wait(timeout);
}

void CallQueue::push(c10::intrusive_ptr<IssuedCall> issued, bool wake) {
  const std::lock_guard lock(signal_->mutex);
  if (wake && !worker_.joinable()) {
    worker_ = start_thread<CommError>("a rank's collectives", [this] { work(); });
  }
  auto* last = issued.get();
  (tail_ == nullptr ? head_ : tail_->next_) = std::move(issued);
  tail_ = last;
  if (wake) signal_->changed.notify_all();
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
  lock.lock();
  running_ = false;
  issued->finish(std::move(error));
}

void CallQueue::finish(IssuedCall& issued) {
  std::unique_lock lock(signal_->mutex);
  while (!issued.finished()) {
    if (!running_ && head_) {
      run_front(lock);
    } else {
      signal_->changed.wait(lock);
    }
  }
}

void CallQueue::work() {
  std::unique_lock lock(signal_->mutex);
  for (;;) {
    if (!running_ && head_) {
      run_front(lock);
    } else if (closing_ && !head_) {
      return;
    } else {
      signal_->changed.wait(lock);
    }
  }
}

void CallQueue::close() {
  {
    std::unique_lock lock(signal_->mutex);
    closing_ = true;
    signal_->changed.notify_all();
    while (running_ || head_) {
      if (!running_) {
        run_front(lock);
      } else {
        signal_->changed.wait(lock);
      }
    }
  }
  if (worker_.joinable()) worker_.join();
}

}  // namespace zero::comm
