#include "zero/comm/hosts_health.h"

#include <fmt/format.h>

#include <utility>

namespace zero::comm {

HostsHealth::HostsHealth(int rank, std::shared_ptr<Rail> rail, std::shared_ptr<Health> local,
                         std::function<PeerError(const PeerError& trouble)> report)
    : rank_(rank), rail_(std::move(rail)), local_(std::move(local)), report_(std::move(report)) {}

void HostsHealth::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

std::exception_ptr HostsHealth::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// Returns true if this failure is the first.
bool HostsHealth::record(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = error;
  return true;
}

void HostsHealth::stop(const std::exception_ptr& error) noexcept {
  if (local_) local_->fail(error);
  rail_->abort();
}

std::exception_ptr HostsHealth::fail(const std::exception_ptr& error) noexcept {
  try {
    check();
  } catch (...) {
    return std::current_exception();
  }
  auto stands = error;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const PeerError& known) {
      if (report_) stands = std::make_exception_ptr(report_(known));
      if (!record(stands)) stands = failure();  // another failure has been heard of meanwhile
    } catch (const std::exception& own) {
      // This rank throws its own words; the others get them with its number.
      const auto cause = fmt::format("Rank {} failed: {}", rank_, own.what());
      if (!record(error)) {
        stands = failure();
      } else if (report_) {
        (void)report_(PeerError(rank_, cause, cause));
      }
    }
  } catch (...) {  // nobody could be told
    if (!record(stands)) stands = failure();
  }
  stop(stands);
  return stands;
}

void HostsHealth::hear(const PeerError& trouble) noexcept {
  const auto error = std::make_exception_ptr(trouble);
  if (record(error)) stop(error);
}

void HostsHealth::abandon(std::string_view why) {
  const auto cause = fmt::format("Rank {} failed: {}", rank_, why);
  fail(std::make_exception_ptr(PeerError(rank_, cause, cause)));
}

}  // namespace zero::comm
