// Files that an engine's states are saved to: the slices of a checkpoint, or whole tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "zero/checkpoint/manifest.h"
#include "zero/comm/group.h"
#include "zero/engine/state_file.h"

namespace zero {

/// Returns the manifest of these states without files, groups and policy of buffers.
Manifest describe(const StateParts& parts, const Progress& progress);

/// Writes the slices and the buffers of a rank to `folder`, in the order of the file and one slice
/// at a time, and returns the file's entry in the manifest. A rank whose states another one saves
/// does not `own` any. The first rank has the factored states.
Manifest::File save_slices(const StateParts& parts, const std::filesystem::path& folder, int rank,
                           int ranks, bool owns);

/// Makes a full unit of each rank's `owned` part; collective.
using GatherUnit = std::function<at::Tensor(int64_t unit, const at::Tensor& owned)>;

/// Writes whole tensors in fp32, by parameter, to one file of rank 0, one unit at a time.
/// Collective. Throws CheckpointError on every rank.
void save_tensors(const StateParts& parts, const Progress& progress, comm::Group& group,
                  const GatherUnit& gather, const std::filesystem::path& path);

}  // namespace zero
