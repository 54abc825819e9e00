// Writes the final weights of a run in the form that other programs read.
#pragma once

#include <filesystem>

#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Writes the model's full parameters, in the places that their `export_places` name and in the
/// engine's dtype, to the folder's model.safetensors, and its sizes to config.json. Each file is
/// whole or absent, and an earlier one stays until then. Rank 0 writes, one unit at a time in
/// memory. Collective. Throws CheckpointError if the disk is full (see comm/agreement.h).
void write_weights(Engine& engine, LanguageModel& model, const RunFolder& folder);

}  // namespace zero::train
