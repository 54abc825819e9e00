// The ends of waits.
#pragma once

#include <algorithm>
#include <chrono>

namespace zero::comm {

using Clock = std::chrono::steady_clock;

/// Limits a timeout to a year: the end of a longer one may be beyond any clock, and so be over.
inline std::chrono::milliseconds within_a_year(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365));
}

/// Returns the end of `timeout` from now, within a year.
inline Clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + within_a_year(timeout);
}

}  // namespace zero::comm
