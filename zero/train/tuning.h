// The parameters of a run's model that are trained: its options choose an adapter, or freeze some.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "zero/models/language/language_model.h"
#include "zero/models/lora/lora.h"
#include "zero/train/options.h"

namespace zero::train {

/// Adds the adapter of the options, and quantises what is frozen beneath it if they say so; or
/// freezes what they name. Returns the adapter. Throws ConfigError as add_lora, quantise_frozen and
/// freeze do, and where a module that is trained whole is tied to
/// another, and CheckpointError for a folder that holds no adapter.
std::optional<Lora> choose_trained(LanguageModel& model, const Options& options);

/// Gives the model the classes of the options' adapter, if that tells classes apart. Where its
/// folder does not name them, a model that has classes keeps its own names, and another calls them
/// LABEL_0 and so on, as transformers does. Throws ConfigError where these models cannot, and
/// CheckpointError.
void choose_head_of_adapter(LanguageModelConfig& sizes, const Options& options);

struct ParameterCounts {
  int64_t all = 0;
  int64_t frozen = 0;
  int64_t packed = 0;        ///< those of the frozen ones that are kept in `format`
  int64_t packed_bytes = 0;  ///< what they take
  BaseFormat format = BaseFormat::as_they_are;

  /// Returns the same counts with as many elements of `element_bytes` in place of the packed ones
  /// as take their bytes: formulas of memory count elements of one dtype.
  ParameterCounts by_memory(int64_t element_bytes) const;
};
/// Counts elements of parameters; a packed weight has those of its matrix.
ParameterCounts count_parameters(const torch::nn::Module& model);
/// Returns the counts of the model that a run builds of these sizes, without building its values.
/// Throws as choose_trained.
ParameterCounts count_parameters(const Options& options, const LanguageModelConfig& sizes);

/// Says for people what is trained; empty if all is.
std::string describe_trained(const torch::nn::Module& model, const std::optional<Lora>& lora);

}  // namespace zero::train
