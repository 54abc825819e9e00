// Reads the values of a file of Hugging Face (config.json, adapter_config.json), and says which
// file, key and value are wrong.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero {

/// Keys that published files have and that change nothing of what a model computes in training:
/// names of classes and versions, how text is generated, and what other programs note.
inline constexpr std::array<std::string_view, 59> kIdleKeys{"architectures",
                                                            "auto_map",
                                                            "dtype",
                                                            "torch_dtype",
                                                            "transformers_version",
                                                            "use_cache",
                                                            "cache_implementation",
                                                            "attn_implementation",
                                                            "id2label",
                                                            "label2id",
                                                            "max_length",
                                                            "temperature",
                                                            "top_p",
                                                            "top_k",
                                                            "do_sample",
                                                            "model_max_length",
                                                            "tokenizer_class",
                                                            "return_dict",
                                                            "chunk_size_feed_forward",
                                                            "n_ctx",
                                                            "n_special",
                                                            "predict_special_tokens",
                                                            "output_past",
                                                            "reorder_and_upcast_attn",
                                                            "gradient_checkpointing",
                                                            "torchscript",
                                                            "output_attentions",
                                                            "output_hidden_states",
                                                            "use_return_dict",
                                                            "num_labels",
                                                            "problem_type",
                                                            "finetuning_task",
                                                            "task_specific_params",
                                                            "prefix",
                                                            "summary_activation",
                                                            "summary_first_dropout",
                                                            "summary_proj_to_labels",
                                                            "summary_type",
                                                            "summary_use_proj",
                                                            "bad_words_ids",
                                                            "diversity_penalty",
                                                            "early_stopping",
                                                            "encoder_no_repeat_ngram_size",
                                                            "length_penalty",
                                                            "min_length",
                                                            "no_repeat_ngram_size",
                                                            "num_beam_groups",
                                                            "num_beams",
                                                            "num_return_sequences",
                                                            "repetition_penalty",
                                                            "typical_p",
                                                            "is_llama_config",
                                                            "transformers.js_config",
                                                            "unsloth_fixed",
                                                            "unsloth_version",
                                                            "max_sequence_length",
                                                            "eos_token_ids",
                                                            "language",
                                                            "sentence_transformers"};

/// Returns whether a key says anything: null, false and an empty object or list do not.
inline bool has_value(const nlohmann::json& value) {
  return !value.is_null() && value != false && !(value.is_structured() && value.empty());
}

/// Parses the text of a file that holds an object: `source` names it in errors. Throws ConfigError
/// for what parse_json refuses, and for anything but an object.
inline nlohmann::json parse_config(std::string_view text, std::string_view source) {
  nlohmann::json object;
  try {
    object = parse_json(text);
  } catch (const Error& error) {
    throw ConfigError(fmt::format("{} {}.", source, error.what()));
  }
  if (!object.is_object()) throw ConfigError(fmt::format("{} must hold a JSON object.", source));
  return object;
}

class ConfigReader {
 public:
  /// As parse_config.
  ConfigReader(std::string_view text, std::string_view source)
      : object_(parse_config(text, source)), source_(source) {}
  /// Reads an object that lies in another one: `source` names both.
  ConfigReader(nlohmann::json object, std::string source)
      : object_(std::move(object)), source_(std::move(source)) {}

  const nlohmann::json& object() const { return object_; }
  const std::string& source() const { return source_; }

  /// Returns whether `key` has a value other than null.
  bool has(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

  /// Returns the value of `key`, or `fallback` when it is absent or null (Hugging Face writes
  /// both). Throws ConfigError for a value of another kind.
  template <typename T>
  T get(const char* key, T fallback) const {
    if (!has(key)) return fallback;
    const auto& found = object_.at(key);
    if (!is_kind<T>(found)) {
      throw ConfigError(fmt::format("{}: key '{}' is {}, which is not {}.", source_, key,
                                    found.dump(), kind<T>()));
    }
    return found.template get<T>();
  }

  /// For keys that change what the model computes: throws ConfigError for any value but
  /// `supported`.
  template <typename T>
  void require(const char* key, T supported) const {
    if (get<T>(key, supported) == supported) return;
    throw ConfigError(fmt::format("{}: key '{}' is {}, and only {} is supported.", source_, key,
                                  object_.at(key).dump(), nlohmann::json(supported).dump()));
  }

  /// Returns what the file has of the keys of tokens with a role, nulls too (transformers has other
  /// tokens by default where a key is absent), as the text of an object.
  std::string token_ids(std::initializer_list<const char*> keys) const {
    nlohmann::json ids = nlohmann::json::object();
    for (const char* key : keys) {
      if (object_.contains(key)) ids[key] = object_.at(key);
    }
    return ids.dump();
  }

  /// Throws ConfigError for every key that is neither known nor idle, and has a value.
  void refuse_others(const std::set<std::string_view>& known) const {
    for (const auto& [key, value] : object_.items()) {
      // Names of the file itself, and tokens with a role.
      const bool idle = key.starts_with('_') || key.ends_with("_token_id") ||
                        (key == "quantization_config" && is_of_bitsandbytes(value)) ||
                        std::ranges::find(kIdleKeys, key) != kIdleKeys.end();
      if (idle || !has_value(value) || known.contains(key)) continue;
      throw ConfigError(
          fmt::format("{}: key '{}' is {}, and it is not among those that this model computes. "
                      "Remove it if it changes nothing of the mathematics.",
                      source_, key, excerpt(value.dump())));
    }
  }

  /// Validates what was made of the values; errors name the file.
  template <typename Config>
  void validate(const Config& config) const {
    try {
      config.validate();
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", source_, error.what()));
    }
  }

 private:
  /// Returns whether the files' weights are quantised in a way that is read back
  /// (checkpoint/bitsandbytes.h).
  static bool is_of_bitsandbytes(const nlohmann::json& value) {
    if (!value.is_object()) return false;
    const auto method = value.find("quant_method");
    return method != value.end() && *method == "bitsandbytes";
  }

  template <typename T>
  static std::string_view kind() {
    if constexpr (std::is_same_v<T, bool>) return "true or false";
    if constexpr (std::is_same_v<T, int64_t>) return "a whole number";
    if constexpr (std::is_same_v<T, double>) return "a number";
    if constexpr (std::is_same_v<T, std::vector<std::string>>) return "a list of strings";
    return "a string";
  }
  template <typename T>
  static bool is_kind(const nlohmann::json& value) {
    if constexpr (std::is_same_v<T, bool>) return value.is_boolean();
    if constexpr (std::is_same_v<T, int64_t>) return value.is_number_integer();
    if constexpr (std::is_same_v<T, double>) return value.is_number();
    if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      return value.is_array() && std::all_of(value.begin(), value.end(), is_kind<std::string>);
    }
    return value.is_string();
  }

  nlohmann::json object_;
  std::string source_;
};

}  // namespace zero
