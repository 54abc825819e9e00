// The language models that are known by name, or by the model_type of a Hugging Face config.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/models/language/language_model.h"

namespace zero {

/// Returns the names of all architectures' sizes.
std::vector<std::string> language_model_names();

/// Returns the sizes of that name, or those of a JSON file (anything that ends in .json or contains
/// a slash), or of a folder's config.json. Throws ConfigError for another name, with the nearest
/// one, and as the next function.
std::unique_ptr<LanguageModelConfig> language_model_config(std::string_view name_or_file);

/// Returns the sizes that a config.json describes; without a model_type it is a GPT-2's.
/// ConfigError, which names `source`, for malformed JSON, another model_type, a variant that is not
/// computed, or sizes that make no model.
std::unique_ptr<LanguageModelConfig> language_model_config_from_json(std::string_view json,
                                                                     std::string_view source);

}  // namespace zero
