// Writes the manifest's part about an engine's states, and files of whole tensors.
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

/// Returns the manifest of these states without files, groups and policy of buffers. With
/// `in_force` it has the parameters in force beside those after a delayed update.
Manifest describe(const StateParts& parts, const Progress& progress, bool in_force = false);

/// Makes a full unit of what each rank owns of it; collective.
using GatherUnit = std::function<at::Tensor(int64_t unit, const at::Tensor& owned)>;

/// Writes whole tensors in fp32, by parameter, to one file of rank 0, one unit at a time.
/// Collective. Throws CheckpointError on every rank.
void save_tensors(const StateParts& parts, const Progress& progress, comm::Group& group,
                  const GatherUnit& gather, const std::filesystem::path& path);

}  // namespace zero
