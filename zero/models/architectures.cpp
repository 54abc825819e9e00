#include "zero/models/architectures.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
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

namespace {

// Returns the type of a model whose file does not name it, or null: by the class that it names
// ("LlamaForCausalLM"), or by keys that one type alone has. Files of GPT-2 that people write have a
// few of its own keys.
nlohmann::json usual_type(const nlohmann::json& object) {
  const auto classes = object.find("architectures");
  if (classes != object.end() && classes->is_array() && !classes->empty() &&
      classes->front().is_string()) {
    auto name = classes->front().get<std::string>();
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    std::string_view longest;
    for (const auto& architecture : architectures()) {
      const std::string_view type = architecture.model_type;
      const auto begin = type.substr(0, type.find('_'));
      if (name.starts_with(begin) && begin.size() > longest.substr(0, longest.find('_')).size())
        longest = type;
    }
    return longest.empty() ? nlohmann::json() : nlohmann::json(longest);
  }
  if (object.contains("type_vocab_size")) return "bert";
  return object.contains("rms_norm_eps") ? nlohmann::json() : nlohmann::json("gpt2");
}

}  // namespace

std::unique_ptr<LanguageModelConfig> language_model_config_from_json(std::string_view json,
                                                                     std::string_view source) {
  auto object = parse_config(json, source);
  if (const auto kind = kind_of(object); kind != JsonKind::model && kind != JsonKind::unknown) {
    throw ConfigError(fmt::format("{} is {}, and no model. Give a model's config.json.", source,
                                  what_it_is(kind)));
  }
  std::vector<std::string> known;
  for (const auto& architecture : architectures())
    known.push_back(fmt::format("\"{}\"", architecture.model_type));
  auto& type = object["model_type"];
  if (type.is_null()) {
    type = usual_type(object);
    if (type.is_null()) {
      throw ConfigError(
          fmt::format("{} has no 'model_type', which says what its other keys mean. Add it; it is "
                      "one of {}.",
                      source, fmt::join(known, ", ")));
    }
    return language_model_config_from_json(object.dump(), source);
  }
  for (const auto& architecture : architectures()) {
    if (type == architecture.model_type) return architecture.from_json(json, source);
  }
  throw ConfigError(fmt::format("{}: key 'model_type' is {}, and only {} is supported.", source,
                                type.dump(), fmt::join(known, ", ")));
}

}  // namespace zero
