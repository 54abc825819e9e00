// How fast disks are, to share states out among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/store/file.h"

namespace zero::store {

/// Seconds to write or read the whole of `file` once in sequence, two chunks of `chunk` bytes (a
/// multiple of kAlignment) under way. `memory` has room for two.
double sweep_seconds(File& file, std::byte* memory, int64_t chunk, bool write);

/// Bytes a second of each folder's disk, written once and read once as states are in a step. One
/// disk after the other, on a file of `bytes` that is removed: a fraction of a second each. A
/// disk's own cache may flatter it. Throws StoreError naming a folder that cannot be used.
std::vector<double> measure_speeds(const std::vector<std::string>& folders,
                                   int64_t bytes = 64 << 20, FileOptions options = {});

}  // namespace zero::store
