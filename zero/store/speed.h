// Measures how fast disks are, so that states can be shared out among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/store/file.h"

namespace zero::store {

/// Returns the seconds that it takes to write or read the whole of `file` once in sequence, with
/// two chunks of `chunk` bytes (a multiple of kAlignment) under way. `memory` has room for two
/// chunks.
double sweep_seconds(File& file, std::byte* memory, int64_t chunk, bool write);

/// Returns the speed of each folder's disk in bytes a second. A file of `bytes` bytes is written
/// once and read once, as states are in a step, and then removed. The disks are measured one after
/// the other, each in a fraction of a second. A disk's own cache may make it look faster. Throws a
/// StoreError that names a folder that cannot be used.
std::vector<double> measure_speeds(const std::vector<std::string>& folders,
                                   int64_t bytes = 64 << 20, FileOptions options = {});

}  // namespace zero::store
