#include "zero/comm/call_work.h"

#include "zero/base/timeline.h"

namespace zero::comm {

bool CallWork::isCompleted() {
  const std::lock_guard lock(signal_->mutex);
  return finished_;
}

bool CallWork::isSuccess() const {
  const std::lock_guard lock(signal_->mutex);
  return finished_ && !error_;
}

std::exception_ptr CallWork::exception() const {
  const std::lock_guard lock(signal_->mutex);
  return error_;
}

bool CallWork::wait(std::chrono::milliseconds /*timeout*/) {
  std::unique_lock lock(signal_->mutex);
  signal_->changed.wait(lock, [&] { return finished_; });
  if (error_) std::rethrow_exception(error_);
  return true;
}

int64_t CallWork::ended() const {
  const std::lock_guard lock(signal_->mutex);
  return ended_;
}

void CallWork::finish(std::exception_ptr error) {
  finished_ = true;
  ended_ = Timeline::now();
  error_ = std::move(error);
  signal_->changed.notify_all();
}

}  // namespace zero::comm
