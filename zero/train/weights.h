// Reads the first weights of a run, and writes the final ones, in the form of other programs.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"
#include "zero/models/lora/lora.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Names what weights and the files beside them (tokenizer, generation) come from.
struct WeightsOrigin {
  std::string from{};  ///< the folder of the run's first weights; empty: there is none
  /// The tokenizer of the run's data, which is copied if it is a tokenizer.json and `from` has
  /// none, or a model of sentencepiece and there is no `from`.
  std::filesystem::path tokenizer{};
};

/// Writes the model's full parameters, in the places that their `export_places` name and in the
/// engine's dtype, to the folder's model.safetensors, or to several files (save_pretrained), and
/// its sizes to config.json. The products of `lora` are merged. Each file is whole or absent, and
/// an earlier one stays until then. Rank 0 writes, one unit at a time in memory, and copies the
/// tokenizer and its like (kBesideWeights). With `replaces` the others of these names there are an
/// earlier model's, and go. Collective. Throws CheckpointError if the disk is full (see
/// comm/agreement.h).
void write_weights(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                   const std::filesystem::path& folder, const WeightsOrigin& origin,
                   bool replaces = false);

/// Writes what a run has trained: its adapter (save_adapter), or else the weights. Files of the
/// other kind go if `earlier`, which rank 0 has, says that a run has written them; if that run is
/// replaced, so do tokenizers and their like that this one does not bring. Collective.
/// Throws as write_weights.
void write_trained(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                   const std::filesystem::path& folder, const WeightsOrigin& origin,
                   const RunFiles& earlier = {});

/// Removes the weights and the sizes that an earlier run has left in a folder, where they are.
/// Rank 0 does.
void remove_weights(Engine& engine, const std::filesystem::path& folder);

/// Removes the tokenizer and its like, too, and the folder if nothing else is there.
void remove_model(Engine& engine, const std::filesystem::path& folder);

/// Reads the weights at `path` into the engine's shards (load_pretrained), and returns a sentence
/// that says what was read and what was left over. With `new_head` the parameters of the model's
/// head keep their random values if the files have none. Collective. Throws CheckpointError.
std::string load_weights(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                         const std::string& path, bool new_head = false);

}  // namespace zero::train
