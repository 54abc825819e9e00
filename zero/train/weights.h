// The final weights of a run, as others read them.
#pragma once

#include <filesystem>

#include "zero/engine/engine.h"
#include "zero/models/gpt2.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Writes the model's full parameters, under Hugging Face's GPT-2 names and in the model's dtype,
/// to the folder's model.safetensors and its sizes to config.json; each file is whole or absent,
/// and an earlier one stays until then. Rank 0 writes, one unit at a time in memory. Collective.
/// Throws CheckpointError where the disk is full (see comm/agreement.h).
void write_weights(Engine& engine, const Gpt2& model, const RunFolder& folder);

}  // namespace zero::train
