// Copies of memory that other ranks have written.
#pragma once

#include <cstdint>

namespace zero::comm {

/// Outputs of at least this many bytes are written past the caches: they would not fit there with
/// their inputs, and a cached store reads the line that it overwrites first.
inline constexpr int64_t kStreamedBytes = int64_t{2} << 20;

/// memcpy, with streaming stores where `bytes` is at least kStreamedBytes.
void copy_bytes(void* to, const void* from, int64_t bytes);

}  // namespace zero::comm
