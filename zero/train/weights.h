// The final weights of a run, as others read them.
#pragma once

#include <filesystem>

#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Writes the model's full parameters, where its `export_places` say and in the engine's dtype, to
/// the folder's model.safetensors and its sizes to config.json; each file is whole or absent,
/// and an earlier one stays until then. Rank 0 writes, one unit at a time in memory. Collective.
/// Throws CheckpointError where the disk is full (see comm/agreement.h).
void write_weights(Engine& engine, LanguageModel& model, const RunFolder& folder);

}  // namespace zero::train
