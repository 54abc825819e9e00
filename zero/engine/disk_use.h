// What one rank keeps on a disk, and how much of it has moved.
#pragma once

#include <cstdint>

namespace zero {

/// States of one rank on disk.
struct DiskUse {
  int64_t bytes = 0;    ///< reserved there
  int64_t read = 0;     ///< bytes since construction
  int64_t written = 0;  ///< the same
  double wait_ms = 0;   ///< that this rank has spent waiting for it
};

}  // namespace zero
