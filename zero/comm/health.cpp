#include "zero/comm/health.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <string>
#include <string_view>

namespace zero::comm {

void Health::check() const {
  if (const auto error = failure()) std::rethrow_exception(error);
}

std::exception_ptr Health::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Health::fail(const std::exception_ptr& error) noexcept {
  int origin = peers_->number(peers_->rank());
  std::string cause;
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& known) {
    origin = known.origin();
    cause = known.cause();
  } catch (const std::exception& known) {
    cause = fmt::format("{} failed: {}", peers_->who(peers_->rank()), known.what());
  } catch (...) {
    cause = fmt::format("{} failed", peers_->who(peers_->rank()));
  }
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error;
  peers_->post_failure(origin, cause);
}

void Health::abandon(std::string_view why) {
  const auto cause = fmt::format("{} failed: {}", peers_->who(peers_->rank()), why);
  fail(std::make_exception_ptr(PeerError(peers_->number(peers_->rank()), cause, cause)));
}

}  // namespace zero::comm
