// Helps loops over arrays that are larger than the caches: they fetch cache lines before they need
// them, and write past the caches.
#pragma once

#include <cstdint>

namespace zero {

/// Arrays of this many bytes or more are written past the caches. Otherwise they would push other
/// data out, and each line would be read before it is overwritten.
inline constexpr int64_t kStreamedBytes = int64_t{2} << 20;

/// Returns the address `bytes` after `at`, which need not be in the array (arithmetic on pointers
/// must stay there, and `at` may be null).
inline const void* address_after(const void* at, uintptr_t bytes) {
  return reinterpret_cast<const void*>(  // NOLINT(performance-no-int-to-ptr): only prefetched
      reinterpret_cast<uintptr_t>(at) + bytes);
}

/// Fetches the cache line some lines after `at`, which a loop that goes upwards in an array will
/// need soon. It never faults, although the line may lie behind the array's end.
///
/// Hardware prefetchers follow an array only within a page, and only some arrays at a time: a loop
/// over seven arrays waits at the beginning of each page.
inline void prefetch_ahead(const void* at) {
  constexpr uintptr_t kAhead = 256;  // bytes; 128 and 512 are as good (AMD Zen 4)
  __builtin_prefetch(address_after(at, kAhead));
}

/// Fetches a line into the second level of the caches, which can wait for more lines at a time than
/// the first. It is for loops that compute so little that only the memory limits them.
inline void prefetch_to_second_level(const void* at) {
  constexpr uintptr_t kAhead = 512;  // bytes; 1024 and 2048 are as good (AMD Zen 4)
  __builtin_prefetch(address_after(at, kAhead), 0, 2);
}

}  // namespace zero
