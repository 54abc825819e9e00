// Counts the time that a rank spends waiting for its peers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace zero::comm {

struct WaitClock {
  std::atomic<int64_t> nanoseconds{0};
};

/// Adds its own lifetime to a clock.
class ClockedScope {
 public:
  explicit ClockedScope(WaitClock& clock)
      : clock_(clock), start_(std::chrono::steady_clock::now()) {}
  ClockedScope(const ClockedScope&) = delete;
  ClockedScope& operator=(const ClockedScope&) = delete;
  ~ClockedScope() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    clock_.nanoseconds.fetch_add(
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count(),
        std::memory_order_relaxed);
  }

 private:
  WaitClock& clock_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace zero::comm
