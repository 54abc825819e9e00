#include "zero/comm/work.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

void rethrow_named(const CallName& call) {
  std::string why;
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  throw CommError(fmt::format("{}{} failed on rank {}: {}", call.collective,
                              call.label.empty() ? "" : fmt::format(" '{}'", call.label), call.rank,
                              why));
}

Work::Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<WaitClock> clock, CallName call,
           Flight flight)
    : work_(std::move(work)),
      clock_(std::move(clock)),
      call_(std::move(call)),
      flight_(std::move(flight)) {}

void Work::wait() {
  if (!work_) return;
  const ClockedScope clocked(*clock_);
  std::optional<Timeline::Scope> waiting;
  if (flight_) waiting.emplace(flight_.timeline(), flight_.waiting(), flight_.label());
  try {
    work_->wait();
  } catch (...) {
    rethrow_named(call_);
  }
  waiting.reset();  // the flight keeps the label
  end_flight(flight_, *work_);
}

bool Work::done() const { return !work_ || work_->isCompleted(); }

}  // namespace zero::comm
