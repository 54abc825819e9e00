// The weights of other programs as a source of states.
#pragma once

#include <filesystem>
#include <memory>

#include "zero/engine/pretrained.h"
#include "zero/engine/state_source.h"

namespace zero {

/// Opens the files at `path`, checks what `load_pretrained` says, and fills in `report`.
std::unique_ptr<StateSource> open_weights(const StateParts& parts,
                                          const std::filesystem::path& path,
                                          const PretrainedOptions& options,
                                          PretrainedReport& report);

}  // namespace zero
