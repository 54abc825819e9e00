// The states that one rank has on a disk, and the bytes that it has moved.
#pragma once

#include <cstdint>

namespace zero {

/// States of one rank on disk.
struct DiskUse {
  int64_t bytes = 0;    ///< reserved on the disk
  int64_t read = 0;     ///< bytes since construction
  int64_t written = 0;  ///< bytes since construction
  double wait_ms = 0;   ///< milliseconds for which this rank has waited for its disk
};

}  // namespace zero
