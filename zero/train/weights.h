// The weights of a run as other programs have them: the first ones and the final ones.
#pragma once

#include <string>

#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Writes the model's full parameters, where its `export_places` say and in the engine's dtype, to
/// the folder's model.safetensors, or to several files (save_pretrained), and its sizes to
/// config.json; each file is whole or absent, and an earlier one stays until then. Rank 0 writes,
/// one unit at a time in memory. Collective. Throws CheckpointError where the disk is full (see
/// comm/agreement.h).
///
/// The files of a tokenizer and of generation that lie in the folder `from`, where the run's first
/// weights came from, are copied; empty: there was none.
void write_weights(Engine& engine, LanguageModel& model, const RunFolder& folder,
                   const std::string& from);

/// Reads the weights at `path` into the engine's shards (load_pretrained), and says for people what
/// was read and what was left over. Collective. Throws CheckpointError.
std::string load_weights(Engine& engine, LanguageModel& model, const std::string& path);

}  // namespace zero::train
