// Linux futexes on words that several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace zero::comm {

/// Sleeps while the word at `address` equals `seen`, at most `limit`. May return early.
inline void futex_wait(const void* address, uint32_t seen, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec relative{.tv_sec = seconds.count(), .tv_nsec = (limit - seconds).count()};
  syscall(SYS_futex, address, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

/// Wakes all that sleep on `address`.
inline void futex_wake(const void* address) {
  syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace zero::comm
