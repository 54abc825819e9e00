// Copies memory that other ranks have written.
#pragma once

#include <cstdint>

namespace zero::comm {

/// Copies as memcpy does; from kStreamedBytes on it uses streaming stores (base/streaming.h).
void copy_bytes(void* to, const void* from, int64_t bytes);

}  // namespace zero::comm
