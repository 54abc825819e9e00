// A model from a folder, to be used and not trained.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "zero/data/tokenizer.h"
#include "zero/engine/engine.h"
#include "zero/models/language/language_model.h"

namespace zero::train {

class LoadedModel {
 public:
  /// Builds the model of the folder's config.json with its weights (load_pretrained). The stage
  /// and the dtype are those of `config`; at stage 3 each rank reads its part alone. Collective.
  /// Throws ConfigError and CheckpointError for what they refuse.
  explicit LoadedModel(const std::filesystem::path& folder, const Config& config = {},
                       std::shared_ptr<comm::Group> group = comm::single());

  LanguageModel& model() { return *model_; }
  Engine& engine() { return *engine_; }

 private:
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Engine> engine_;
};

/// Returns the tokens that end a text: eos_token_id of the folder's generation_config.json and
/// config.json, and the eos_token of its tokenizer_config.json. DataError for a file that is not
/// JSON.
std::vector<int64_t> end_tokens(const std::filesystem::path& folder, const Tokenizer& tokenizer);

}  // namespace zero::train
