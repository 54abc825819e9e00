// Copies memory that other ranks have written.
#pragma once

#include <cstdint>

namespace zero::comm {

/// memcpy, with streaming stores from kStreamedBytes on (base/streaming.h).
void copy_bytes(void* to, const void* from, int64_t bytes);

}  // namespace zero::comm
