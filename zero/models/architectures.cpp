#include "zero/models/architectures.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/json_kind.h"
#include "zero/models/bert/bert_language_model.h"
#include "zero/models/gpt2/gpt2_language_model.h"
#include "zero/models/language/config_reader.h"
#include "zero/models/llama/llama_language_model.h"

namespace zero {
namespace {

/// Returns all that there are. The first is what a configuration without a model_type describes.
std::vector<Architecture> architectures() {
  std::vector<Architecture> all{gpt2_architecture()};
  for (const auto family : {LlamaFamily::llama, LlamaFamily::qwen2, LlamaFamily::qwen3,
                            LlamaFamily::mistral, LlamaFamily::gemma, LlamaFamily::gemma3})
    all.push_back(llama_architecture(family));
  all.push_back(bert_architecture());
  return all;
}

}  // namespace

std::vector<std::string> language_model_names() {
  std::vector<std::string> names;
  for (const auto& architecture : architectures())
    names.insert(names.end(), architecture.names.begin(), architecture.names.end());
  return names;
}

std::unique_ptr<LanguageModelConfig> language_model_config(std::string_view name_or_file) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(name_or_file, ignored);
  if (!folder && !name_or_file.ends_with(".json") &&
      name_or_file.find('/') == std::string_view::npos) {
    for (const auto& architecture : architectures()) {
      const auto& names = architecture.names;
      if (std::find(names.begin(), names.end(), name_or_file) != names.end())
        return architecture.preset(name_or_file);
    }
    const auto names = language_model_names();
    throw ConfigError(
        fmt::format("There is no model named '{}'.{} Known models: {}; or give the path of a "
                    "config.json, or of a folder that has one.",
                    name_or_file, did_you_mean(name_or_file, names), fmt::join(names, ", ")));
  }
  const std::filesystem::path path = folder ? std::filesystem::path(name_or_file) / "config.json"
                                            : std::filesystem::path(name_or_file);
  std::ifstream file{path};
  std::ostringstream text;
  if (!file || (!(text << file.rdbuf()) && file.peek() != std::ifstream::traits_type::eof())) {
    throw ConfigError(
        fmt::format("The model configuration {} cannot be read. Give a JSON file or one of: {}.",
                    path.string(), fmt::join(language_model_names(), ", ")));
  }
  if (text.str().empty())
    throw ConfigError(fmt::format("The model configuration {} is empty.", path.string()));
  return language_model_config_from_json(text.str(), path.string());
}

std::unique_ptr<LanguageModelConfig> language_model_config_from_json(std::string_view json,
                                                                     std::string_view source) {
  const auto object = parse_config(json, source);
  const auto type = object.find("model_type");
  if (const auto kind = kind_of(object); kind != JsonKind::model && kind != JsonKind::unknown) {
    throw ConfigError(fmt::format("{} is {}, and no model. Give a model's config.json.", source,
                                  what_it_is(kind)));
  }
  if (type == object.end() || type->is_null())
    return architectures().front().from_json(json, source);
  std::vector<std::string> known;
  for (const auto& architecture : architectures()) {
    if (*type == architecture.model_type) return architecture.from_json(json, source);
    known.push_back(fmt::format("\"{}\"", architecture.model_type));
  }
  throw ConfigError(fmt::format("{}: key 'model_type' is {}, and only {} is supported.", source,
                                type->dump(), fmt::join(known, ", ")));
}

}  // namespace zero
