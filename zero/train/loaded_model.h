// A model from a folder, to be used and not trained.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/data/tokenizer.h"
#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"
#include "zero/models/lora/lora.h"
#include "zero/train/options.h"

namespace zero::train {

/// Returns options that name a model (`from`) and perhaps its adapter and the format of what lies
/// beneath (`lora`). The folder is that of a model, or that of an adapter, whose settings name the
/// model's. `adapter` names one beside the model. Throws ConfigError where there is no folder, and
/// for a format without an adapter, and CheckpointError for settings that name no model.
Options options_of_model(const std::string& folder, const std::string& adapter = {},
                         BaseFormat format = BaseFormat::as_they_are);

class LoadedModel {
 public:
  /// Builds the model of the folder's config.json, or the one beneath an adapter with that, and
  /// reads the weights. The stage and the dtype are those of `config`; at stage 3 each rank reads
  /// its part alone. Collective. Throws ConfigError and CheckpointError for what is refused.
  explicit LoadedModel(const std::filesystem::path& folder, const Config& config = {},
                       const std::shared_ptr<comm::Group>& group = comm::single());
  /// The model that options name (options_of_model).
  explicit LoadedModel(const Options& options, const Config& config = {},
                       const std::shared_ptr<comm::Group>& group = comm::single());
  /// The same, of other sizes than those of its config.json: with another head.
  LoadedModel(const LanguageModelConfig& sizes, const Options& options, const Config& config,
              const std::shared_ptr<comm::Group>& group);

  LanguageModel& model() { return *model_; }
  Engine& engine() { return *engine_; }
  const std::optional<Lora>& lora() const { return lora_; }
  /// Says what was read and what was left over.
  const std::string& report() const { return report_; }

 private:
  std::unique_ptr<LanguageModel> model_;
  std::optional<Lora> lora_;
  std::unique_ptr<Engine> engine_;
  std::string report_;
};

/// Returns the tokens that end a text: eos_token_id of the folder's generation_config.json and
/// config.json, and the eos_token of its tokenizer_config.json. DataError for a file that is not
/// JSON.
std::vector<int64_t> end_tokens(const std::filesystem::path& folder, const Tokenizer& tokenizer);

}  // namespace zero::train
