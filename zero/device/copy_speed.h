// How fast bytes go between a device and its host: what an offloaded step is compared with.
#pragma once

#include <c10/core/Device.h>

namespace zero {

/// Bytes a second.
struct CopySpeed {
  double down = 0;  ///< to the host
  double up = 0;    ///< to the device
};

/// Returns the best of several copies of 64 MiB each way, between pinned memory of the host and the
/// device, in some tenths of a second. On the CPU, whose memory is both, it is the speed at which
/// this thread copies. Throws OutOfMemory.
CopySpeed best_copy_speed(c10::Device device);

}  // namespace zero
