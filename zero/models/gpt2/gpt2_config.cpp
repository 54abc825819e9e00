#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "zero/base/error.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/language/config_checks.h"
#include "zero/models/language/config_reader.h"
#include "zero/models/layers/activation.h"

namespace zero {
namespace {

const std::map<std::string, Gpt2Config, std::less<>>& presets() {
  static const std::map<std::string, Gpt2Config, std::less<>> table{
      {"gpt2", {}},
      {"gpt2-medium", {.width = 1024, .layers = 24, .heads = 16}},
      {"gpt2-large", {.width = 1280, .layers = 36, .heads = 20}},
      {"gpt2-xl", {.width = 1600, .layers = 48, .heads = 25}},
      {"gpt2-nano", {.width = 384, .layers = 6, .heads = 6}},
  };
  return table;
}

}  // namespace

Gpt2Config& Gpt2Config::set_dropout(double p) {
  embedding_dropout = attention_dropout = residual_dropout = p;
  return *this;
}

void Gpt2Config::validate() const {
  check_sizes("GPT-2", {{"vocab_size", vocab_size, LargestSizes::vocabulary},
                        {"n_positions", context, LargestSizes::context},
                        {"n_embd", width, LargestSizes::width},
                        {"n_layer", layers, LargestSizes::layers},
                        {"n_head", heads, LargestSizes::heads}});
  if (inner < 0)
    throw ConfigError(
        fmt::format("GPT-2's n_inner is {}; it must be positive, or null for 4 * n_embd.", inner));
  if (inner > 0) check_size("GPT-2", "n_inner", inner, LargestSizes::inner);
  if (width % heads != 0) {
    throw ConfigError(
        fmt::format("GPT-2's n_embd of {} is not a multiple of its n_head of {}.", width, heads));
  }
  check_probability("GPT-2", "embd_pdrop", embedding_dropout);
  check_probability("GPT-2", "attn_pdrop", attention_dropout);
  check_probability("GPT-2", "resid_pdrop", residual_dropout);
  const auto& known = activation_names();
  if (std::find(known.begin(), known.end(), activation) == known.end()) {
    throw ConfigError(fmt::format("GPT-2's activation_function is '{}', and only {} are supported.",
                                  activation, fmt::join(known, ", ")));
  }
  if (!(layer_norm_eps > 0)) {
    throw ConfigError(
        fmt::format("GPT-2's layer_norm_epsilon is {}; it must be positive.", layer_norm_eps));
  }
  if (!(initializer_range >= 0)) {
    throw ConfigError(fmt::format("GPT-2's initializer_range is {}; it must not be negative.",
                                  initializer_range));
  }
}

int64_t Gpt2Config::parameter_count() const {
  const int64_t feed_forward = inner > 0 ? inner : 4 * width;
  const int64_t norm = 2 * width;
  const int64_t attention = width * 3 * width + 3 * width + width * width + width;
  const int64_t mlp = width * feed_forward + feed_forward + feed_forward * width + width;
  const int64_t embeddings = (vocab_size * (tie_word_embeddings ? 1 : 2) + context) * width;
  return embeddings + layers * (2 * norm + attention + mlp) + norm;
}

std::vector<std::array<int64_t, 2>> Gpt2Config::matrices() const {
  const int64_t feed_forward = inner > 0 ? inner : 4 * width;
  std::vector<std::array<int64_t, 2>> all{{vocab_size, width}, {context, width}};
  if (!tie_word_embeddings) all.push_back({vocab_size, width});
  for (int64_t layer = 0; layer < layers; ++layer) {
    all.insert(all.end(),
               {{width, 3 * width}, {width, width}, {width, feed_forward}, {feed_forward, width}});
  }
  return all;
}

std::string Gpt2Config::to_json() const {
  nlohmann::ordered_json object{{"model_type", "gpt2"},
                                {"architectures", {"GPT2LMHeadModel"}},
                                {"activation_function", activation},
                                {"vocab_size", vocab_size},
                                {"n_positions", context},
                                {"n_embd", width},
                                {"n_layer", layers},
                                {"n_head", heads},
                                {"n_inner", nullptr},
                                {"embd_pdrop", embedding_dropout},
                                {"attn_pdrop", attention_dropout},
                                {"resid_pdrop", residual_dropout},
                                {"layer_norm_epsilon", layer_norm_eps},
                                {"initializer_range", initializer_range},
                                {"tie_word_embeddings", tie_word_embeddings}};
  if (!scale_scores) object["scale_attn_weights"] = false;
  if (scale_scores_by_layer) object["scale_attn_by_inverse_layer_idx"] = true;
  if (inner > 0) object["n_inner"] = inner;
  object.update(nlohmann::ordered_json::parse(token_ids));
  return object.dump(2) + "\n";
}

Gpt2Config Gpt2Config::from_json(std::string_view text, std::string_view source) {
  const ConfigReader read(text, source);
  std::set<std::string_view> known;
  const auto get = [&]<typename T>(const char* key, T fallback) {
    known.insert(key);
    return read.get<T>(key, fallback);
  };
  // transformers sets the common name after GPT-2's own.
  const auto size = [&](const char* key, const char* common, int64_t fallback) {
    return get(common, get(key, fallback));
  };
  read.require<std::string>("model_type", "gpt2");
  known.insert("model_type");

  Gpt2Config config;
  config.vocab_size = get("vocab_size", config.vocab_size);
  config.context = size("n_positions", "max_position_embeddings", config.context);
  config.width = size("n_embd", "hidden_size", config.width);
  config.layers = size("n_layer", "num_hidden_layers", config.layers);
  config.heads = size("n_head", "num_attention_heads", config.heads);
  config.inner = get("n_inner", config.inner);
  config.embedding_dropout = get("embd_pdrop", 0.1);
  config.attention_dropout = get("attn_pdrop", 0.1);
  config.residual_dropout = get("resid_pdrop", 0.1);
  config.layer_norm_eps = get("layer_norm_epsilon", config.layer_norm_eps);
  config.initializer_range = get("initializer_range", config.initializer_range);
  config.tie_word_embeddings = get("tie_word_embeddings", config.tie_word_embeddings);
  config.scale_scores = get("scale_attn_weights", config.scale_scores);
  config.scale_scores_by_layer =
      get("scale_attn_by_inverse_layer_idx", config.scale_scores_by_layer);
  config.activation = activation_called(get("activation_function", config.activation));
  if (read.object().value("pruned_heads", nlohmann::json::object()).empty())
    known.insert("pruned_heads");
  read.refuse_others(known);
  config.token_ids = read.token_ids({"bos_token_id", "eos_token_id", "pad_token_id"});
  read.validate(config);
  return config;
}

const std::vector<std::string>& Gpt2Config::preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& [name, config] : presets()) all.push_back(name);
    return all;
  }();
  return names;
}

Gpt2Config Gpt2Config::preset(std::string_view name) {
  const auto found = presets().find(name);
  if (found != presets().end()) return found->second;
  throw ConfigError(fmt::format("There is no GPT-2 named '{}'.{} There are {}.", name,
                                did_you_mean(name, preset_names()),
                                fmt::join(preset_names(), ", ")));
}

}  // namespace zero
