#include "zero/comm/work.h"

#include <c10/util/Exception.h>

#include <memory>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

Work::Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<WaitClock> clock)
    : work_(std::move(work)), clock_(std::move(clock)) {}

void Work::wait() {
  if (!work_) return;
  const ClockedScope clocked(*clock_);
  try {
    work_->wait();
  } catch (const c10::Error& error) {  // from a backend that is not ours
    throw CommError("A collective failed: " + std::string(error.what_without_backtrace()));
  }
}

bool Work::done() const { return !work_ || work_->isCompleted(); }

}  // namespace zero::comm
