// Adapters in peft's files: a folder with `adapter_config.json` and `adapter_model.safetensors`.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "zero/engine/engine.h"
#include "zero/engine/pretrained.h"
#include "zero/models/lora/lora.h"

namespace zero {

/// The names in a folder.
inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";
/// The names of the classes, in order, of an adapter whose model tells classes apart: a JSON list.
/// peft leaves them to the program that builds its model.
inline constexpr const char* kAdapterLabels = "labels.json";

/// Reads the settings of a peft folder. Throws CheckpointError, which names the file, where it
/// cannot be read, and for a key that changes the model in a way that is not computed here: biases,
/// ranks by pattern, layers by number, and every key that is not known and has
/// a value.
LoraSettings read_adapter_config(const std::string& folder);

/// Returns the folder of the model beneath a peft folder, as its settings name it. Throws
/// CheckpointError where they cannot be read, or name none.
std::string base_model_of(const std::string& folder);

/// Returns the names of the classes of a peft folder; none if its model tells no classes apart, or
/// another program wrote it. Throws CheckpointError.
std::vector<std::string> read_adapter_labels(const std::string& folder);

/// Returns the number of classes of a peft folder whose task_type is `kClassesTask`: the rows of
/// its classifier. Returns 0 for another task, and if the adapter brings no classifier. Throws
/// CheckpointError where the weights cannot be read.
int64_t read_adapter_classes(const std::string& folder);

/// The task_type of peft's folders whose model tells classes apart.
inline constexpr const char* kClassesTask = "SEQ_CLS";

/// Returns whether the settings of a peft folder say that its model tells classes apart, so that
/// `kAdapterLabels` is the adapter's. False where they cannot be read.
bool has_adapter_labels(const std::string& folder);

struct SaveAdapterOptions {
  std::string base_model{};           ///< what the config names as the model beneath
  std::string task = "CAUSAL_LM";     ///< peft's task_type; empty: none
  std::vector<std::string> labels{};  ///< names of classes; empty: the model has none
};

/// Writes the adapter as peft does: A and B of each layer (with DoRA the magnitudes, too), and the
/// parameters of `modules_to_save`, in fp32, under "base_model.model." and their paths. Rank 0
/// writes to the folder, which exists, with one tensor in memory; each file is whole or absent. The
/// names of classes of an earlier adapter go if this one has none.
/// Collective. Throws CheckpointError on every rank where the disk is full.
void save_adapter(Engine& engine, const Lora& lora, const std::string& folder,
                  const SaveAdapterOptions& options = {});

/// Sets the adapter's parameters to those of a peft folder; their moments stay. Every rank reads a
/// tensor at a time. Collective. Throws CheckpointError, and changes nothing, where the file lacks
/// one, has others, or one has another shape.
void load_adapter(Engine& engine, const Lora& lora, const std::string& folder);

/// Sets the magnitudes of DoRA to the lengths of the rows of the weights, which have been read
/// after add_lora (NamedTensors::values_follow): the model then computes what it did without the
/// adapter. Every rank holds a weight at a time. `packed` are the weights that are kept in bytes
/// (quantised_weights). Without DoRA it does nothing. Collective. Throws ConfigError for a weight
/// of bytes that is not among `packed`.
void begin_magnitudes(Engine& engine, const Lora& lora,
                      const std::map<std::string, PackedMatrix>& packed = {});

/// Returns SavePretrainedOptions::merged for an adapter, with which save_pretrained writes a model
/// without one that computes the same.
std::map<std::string, MergedProduct> merged_products(const Lora& lora);

/// Returns the names of the parameters that add_lora has added: PretrainedOptions::added.
std::set<std::string> added_parameters(const Lora& lora);

}  // namespace zero
