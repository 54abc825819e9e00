// Hugging Face's config.json of Llama and its relatives. Defaults and rules are those of the
// classes of transformers 5.24.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/language/config_reader.h"
#include "zero/models/llama/llama_config.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

struct FamilyFacts {
  LlamaFamily family;
  std::string_view type;
  std::string_view class_name;
  LlamaConfig defaults;  ///< a head_dim of 0 is width / heads
};

const std::array<FamilyFacts, 6>& families() {
  static const auto table = [] {
    LlamaConfig llama{.head_dim = 0};
    LlamaConfig qwen2 = llama;
    qwen2.family = LlamaFamily::qwen2;
    qwen2.vocab_size = 151936;
    qwen2.inner = 22016;
    qwen2.context = 32768;
    qwen2.qkv_bias = true;
    LlamaConfig qwen3 = qwen2;
    qwen3.family = LlamaFamily::qwen3;
    qwen3.qkv_bias = false;
    qwen3.head_norms = true;
    qwen3.head_dim = 128;
    LlamaConfig mistral = llama;
    mistral.family = LlamaFamily::mistral;
    mistral.inner = 14336;
    mistral.key_heads = 8;
    mistral.context = 131072;
    LlamaConfig gemma{.family = LlamaFamily::gemma,
                      .vocab_size = 256000,
                      .context = 8192,
                      .width = 3072,
                      .inner = 24576,
                      .layers = 28,
                      .heads = 16,
                      .key_heads = 16,
                      .head_dim = 256,
                      .gemma = true,
                      .tie_word_embeddings = true,
                      .padding = 0};
    LlamaConfig gemma3 = gemma;
    gemma3.family = LlamaFamily::gemma3;
    gemma3.vocab_size = 262208;
    gemma3.context = 131072;
    gemma3.width = 2304;
    gemma3.inner = 9216;
    gemma3.layers = 26;
    gemma3.heads = 8;
    gemma3.key_heads = 4;
    gemma3.head_norms = true;
    gemma3.branch_norms = true;
    gemma3.query_scalar = 256;
    gemma3.rotary.theta = 1e6;
    gemma3.window_rotary.emplace();
    return std::array<FamilyFacts, 6>{{
        {LlamaFamily::llama, "llama", "LlamaForCausalLM", llama},
        {LlamaFamily::qwen2, "qwen2", "Qwen2ForCausalLM", qwen2},
        {LlamaFamily::qwen3, "qwen3", "Qwen3ForCausalLM", qwen3},
        {LlamaFamily::mistral, "mistral", "MistralForCausalLM", mistral},
        {LlamaFamily::gemma, "gemma", "GemmaForCausalLM", gemma},
        {LlamaFamily::gemma3, "gemma3_text", "Gemma3ForCausalLM", gemma3},
    }};
  }();
  return table;
}

bool has_attention_bias(LlamaFamily family) {
  return family != LlamaFamily::qwen2 && family != LlamaFamily::mistral;
}

std::string activation_of(const LlamaConfig& config) {
  return config.gemma ? "gelu_pytorch_tanh" : "silu";
}

const FamilyFacts& facts_of(LlamaFamily family) { return families()[static_cast<size_t>(family)]; }

constexpr std::array kRotaryKinds{
    std::pair{RotaryKind::standard, "default"}, std::pair{RotaryKind::linear, "linear"},
    std::pair{RotaryKind::dynamic, "dynamic"}, std::pair{RotaryKind::llama3, "llama3"},
    std::pair{RotaryKind::yarn, "yarn"}};

/// A `rope_scaling` that has anything takes the place of all of `rope_parameters`. A theta inside
/// wins over the outer one.
RotaryOptions rotary_of(const ConfigReader& read) {
  RotaryOptions rotary;
  const bool older =
      read.has("rope_scaling") && read.object().at("rope_scaling") != nlohmann::json::object();
  const char* section = older ? "rope_scaling" : "rope_parameters";
  const auto found = read.has(section) ? read.object().at(section) : nlohmann::json::object();
  if (!found.is_object()) {
    throw ConfigError(fmt::format("{}: key '{}' is {}, which is no object.", read.source(), section,
                                  found.dump()));
  }
  const ConfigReader rope(found, fmt::format("{}: {}", read.source(), section));
  rotary.theta = read.get("rope_theta", rotary.theta);
  rotary.theta = rope.get("rope_theta", rotary.theta);
  const auto type = rope.get<std::string>("rope_type", rope.get<std::string>("type", "default"));
  const auto kind = std::find_if(kRotaryKinds.begin(), kRotaryKinds.end(),
                                 [&](const auto& each) { return type == each.second; });
  if (kind == kRotaryKinds.end()) {
    std::vector<std::string_view> names;
    for (const auto& each : kRotaryKinds) names.emplace_back(each.second);
    throw ConfigError(fmt::format("{}: key 'rope_type' is '{}', and only {} are supported.",
                                  rope.source(), type, fmt::join(names, ", ")));
  }
  rotary.kind = kind->first;
  std::set<std::string_view> known{"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  rope.require("partial_rotary_factor", 1.0);
  read.require("partial_rotary_factor", 1.0);
  if (rotary.kind == RotaryKind::standard) {
    rope.refuse_others(known);
    return rotary;
  }
  const auto original = read.get<int64_t>("original_max_position_embeddings",
                                          rope.get<int64_t>("original_max_position_embeddings", 0));
  const auto need = [&](const char* key, bool is_there) {
    if (is_there) return;
    throw ConfigError(fmt::format("{}: a rope_type of '{}' needs the key '{}', which is absent.",
                                  rope.source(), type, key));
  };
  need("factor", rope.has("factor") || (rotary.kind == RotaryKind::yarn && original > 0));
  known.insert("factor");
  rotary.factor = rope.get("factor", 1.0);
  if (rotary.kind == RotaryKind::llama3) {
    known.insert({"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
    need("low_freq_factor", rope.has("low_freq_factor"));
    need("high_freq_factor", rope.has("high_freq_factor"));
    need("original_max_position_embeddings", original > 0);
    rotary.low_frequency_factor = rope.get("low_freq_factor", rotary.low_frequency_factor);
    rotary.high_frequency_factor = rope.get("high_freq_factor", rotary.high_frequency_factor);
    rotary.original_context = original;
  }
  if (rotary.kind == RotaryKind::yarn) {
    known.insert({"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
                  "mscale_all_dim", "original_max_position_embeddings"});
    rotary.beta_fast = rope.get("beta_fast", rotary.beta_fast);
    rotary.beta_slow = rope.get("beta_slow", rotary.beta_slow);
    rotary.truncate = rope.get("truncate", rotary.truncate);
    rotary.mscale = rope.get("mscale", rotary.mscale);
    rotary.mscale_all_dim = rope.get("mscale_all_dim", rotary.mscale_all_dim);
    if (rope.has("attention_factor")) rotary.attention_factor = rope.get("attention_factor", 1.0);
    rotary.original_context = original;
    if (!rope.has("factor")) {
      rotary.factor = static_cast<double>(read.get<int64_t>("max_position_embeddings", original)) /
                      static_cast<double>(original);
    }
  }
  rope.refuse_others(known);
  return rotary;
}

/// Reads Gemma 3's rotary positions, which differ for layers with and without a window. The keys of
/// `rope_scaling` take their places among those of full attention.
void read_rotary_by_layer(const ConfigReader& read, LlamaConfig& config) {
  const bool named = read.has("rope_parameters");
  const ConfigReader kinds(named ? read.object().at("rope_parameters") : nlohmann::json::object(),
                           fmt::format("{}: rope_parameters", read.source()));
  if (!kinds.object().is_object())
    throw ConfigError(fmt::format("{}: it is no object.", kinds.source()));
  kinds.refuse_others({"full_attention", "sliding_attention"});
  const auto of = [&](const char* kind, const char* theta, double fallback, bool scaled) {
    nlohmann::json object{{"rope_theta", read.get(theta, fallback)},
                          {"max_position_embeddings", config.context}};
    auto& parameters = object["rope_parameters"] = nlohmann::json::object();
    if (kinds.has(kind)) parameters = kinds.object().at(kind);
    if (scaled && read.has("rope_scaling")) {
      const auto& scaling = read.object().at("rope_scaling");
      if (!scaling.is_object() || !parameters.is_object()) {
        throw ConfigError(fmt::format("{}: key '{}' is {}, which is no object.", read.source(),
                                      scaling.is_object() ? kind : "rope_scaling",
                                      (scaling.is_object() ? parameters : scaling).dump()));
      }
      parameters.update(scaling);
    }
    return rotary_of(ConfigReader(object, fmt::format("{}: {}", read.source(), kind)));
  };
  config.window_rotary =
      of("sliding_attention", "rope_local_base_freq", config.window_rotary->theta, false);
  if (config.window_rotary->kind != RotaryKind::standard) {
    throw ConfigError(fmt::format(
        "{}: the rope_type of sliding_attention is another than 'default', which is the only one "
        "that is supported there.",
        kinds.source()));
  }
  config.rotary = of("full_attention", "rope_theta", config.rotary.theta, true);
}

/// Returns the windows by layer.
std::vector<int64_t> windows_of(const ConfigReader& read, const LlamaConfig& config) {
  std::vector<int64_t> windows(static_cast<size_t>(config.layers), 0);
  const auto& object = read.object();
  const int64_t window =
      object.contains("sliding_window") ? read.get<int64_t>("sliding_window", 0) : 4096;
  if (window < 0) {
    throw ConfigError(
        fmt::format("{}: key 'sliding_window' is {}; it must be positive, or null for none.",
                    read.source(), window));
  }
  if (config.family == LlamaFamily::mistral) {
    std::fill(windows.begin(), windows.end(), window);
    return windows;
  }
  if (config.family == LlamaFamily::llama || config.family == LlamaFamily::gemma) {
    if (read.has("sliding_window")) read.require<int64_t>("sliding_window", 0);
    return windows;
  }
  const bool gemma3 = config.family == LlamaFamily::gemma3;
  if (!gemma3 && !read.get("use_sliding_window", false)) return windows;
  // Gemma 3: every sixth layer has none.
  const auto first = gemma3 ? 0 : read.get<int64_t>("max_window_layers", 28);
  const auto every = gemma3 ? read.get<int64_t>("sliding_window_pattern", 6) : 0;
  if (gemma3 && (window == 0 || every < 1)) {
    throw ConfigError(fmt::format(
        "{}: keys 'sliding_window' and 'sliding_window_pattern' are {} and {}; both must be "
        "positive.",
        read.source(), window, every));
  }
  const bool named = read.has("layer_types");
  const auto types = named ? object.at("layer_types") : nlohmann::json::array();
  if (named && (!types.is_array() || types.size() != windows.size())) {
    throw ConfigError(fmt::format("{}: key 'layer_types' is {}, which is no list of {} layers.",
                                  read.source(), types.dump(), windows.size()));
  }
  for (size_t i = 0; i < windows.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    const bool slides = named ? types[i] == "sliding_attention"
                              : layer >= first && (every == 0 || (layer + 1) % every != 0);
    if (named && !slides && types[i] != "full_attention") {
      throw ConfigError(
          fmt::format("{}: key 'layer_types' has {}, and only \"full_attention\" and "
                      "\"sliding_attention\" are supported.",
                      read.source(), types[i].dump()));
    }
    windows[i] = slides ? window : 0;
  }
  return windows;
}

/// Returns the rope_scaling of config.json, which is null for the default.
Json scaling_of(const RotaryOptions& rotary) {
  if (rotary.kind == RotaryKind::standard) return nullptr;
  const auto kind = std::find_if(kRotaryKinds.begin(), kRotaryKinds.end(),
                                 [&](const auto& each) { return rotary.kind == each.first; });
  Json scaling{{"rope_type", kind->second}, {"factor", rotary.factor}};
  if (rotary.original_context > 0)
    scaling["original_max_position_embeddings"] = rotary.original_context;
  if (rotary.kind == RotaryKind::llama3) {
    scaling["low_freq_factor"] = rotary.low_frequency_factor;
    scaling["high_freq_factor"] = rotary.high_frequency_factor;
  }
  if (rotary.kind == RotaryKind::yarn) {
    scaling["beta_fast"] = rotary.beta_fast;
    scaling["beta_slow"] = rotary.beta_slow;
    if (!rotary.truncate) scaling["truncate"] = false;
    if (rotary.attention_factor) scaling["attention_factor"] = *rotary.attention_factor;
    if (rotary.mscale != 0) scaling["mscale"] = rotary.mscale;
    if (rotary.mscale_all_dim != 0) scaling["mscale_all_dim"] = rotary.mscale_all_dim;
  }
  return scaling;
}

}  // namespace

std::string_view model_type(LlamaFamily family) { return facts_of(family).type; }
std::string_view class_name(LlamaFamily family) { return facts_of(family).class_name; }

LlamaConfig LlamaConfig::from_json(std::string_view json, std::string_view source) {
  const ConfigReader read(json, source);
  const auto type = read.get<std::string>("model_type", "llama");
  const auto facts = std::find_if(families().begin(), families().end(),
                                  [&](const auto& each) { return type == each.type; });
  if (facts == families().end()) {
    std::vector<std::string_view> types;
    for (const auto& each : families()) types.push_back(each.type);
    throw ConfigError(fmt::format("{}: key 'model_type' is '{}', and only {} are supported.",
                                  source, type, fmt::join(types, ", ")));
  }
  std::set<std::string_view> known;
  known.insert({"pretraining_tp", "max_window_layers", "sliding_window"});
  const auto get = [&]<typename T>(const char* key, T fallback) {
    known.insert(key);
    return read.get<T>(key, fallback);
  };

  LlamaConfig config = facts->defaults;
  known.insert("model_type");
  config.vocab_size = get("vocab_size", config.vocab_size);
  config.context = get("max_position_embeddings", config.context);
  config.width = get("hidden_size", config.width);
  config.inner = get("intermediate_size", config.inner);
  config.layers = get("num_hidden_layers", config.layers);
  config.heads = get("num_attention_heads", config.heads);
  // Absent is the class's default, and null is as many as there are of queries. Llama's class has
  // null by default.
  known.insert("num_key_value_heads");
  const bool has_default = config.family != LlamaFamily::llama;
  config.key_heads =
      read.get("num_key_value_heads", has_default && !read.object().contains("num_key_value_heads")
                                          ? config.key_heads
                                          : config.heads);
  if (config.head_dim == 0 && config.heads > 0) config.head_dim = config.width / config.heads;
  config.head_dim = get("head_dim", config.head_dim);
  config.norm_eps = get("rms_norm_eps", config.norm_eps);
  config.tie_word_embeddings = get("tie_word_embeddings", config.tie_word_embeddings);
  config.attention_dropout = get("attention_dropout", config.attention_dropout);
  config.initializer_range = get("initializer_range", config.initializer_range);
  if (has_attention_bias(config.family))
    config.qkv_bias = config.output_bias = get("attention_bias", false);
  if (config.family == LlamaFamily::llama) config.inner_bias = get("mlp_bias", false);
  if (config.family == LlamaFamily::qwen2 || config.family == LlamaFamily::qwen3)
    known.insert({"use_sliding_window", "layer_types"});
  const bool gemma3 = config.family == LlamaFamily::gemma3;
  const char* activation = gemma3 ? "hidden_activation" : "hidden_act";
  known.insert(activation);
  // Gemma's first files say gelu and mean the tanh form, and so does transformers.
  const bool older = config.family == LlamaFamily::gemma &&
                     read.get<std::string>(activation, activation_of(config)) == "gelu";
  if (!older) read.require<std::string>(activation, activation_of(config));
  // Files of Gemma have both keys.
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const bool same = read.has(key) && read.object()[key] == activation_of(config);
    if (same || older) known.insert(key);
  }
  if (gemma3) {
    known.insert({"rope_local_base_freq", "sliding_window_pattern", "layer_types"});
    config.query_scalar = get("query_pre_attn_scalar", config.query_scalar);
  }
  const auto& object = read.object();
  const bool unpadded = object.contains("pad_token_id") && object["pad_token_id"].is_null();
  config.padding = unpadded ? -1 : get("pad_token_id", config.padding);
  if (read.has("pad_token_id") && config.padding < 0) config.padding += config.vocab_size;
  known.insert({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
                "original_max_position_embeddings"});
  if (gemma3) {
    read_rotary_by_layer(read, config);
  } else {
    config.rotary = rotary_of(read);
  }
  read.refuse_others(known);

  config.token_ids = read.token_ids({"bos_token_id", "eos_token_id"});
  read.validate(config);
  config.windows = windows_of(read, config);
  return config;
}

std::string LlamaConfig::to_json() const {
  Json object{
      {"model_type", model_type(family)},
      {"architectures", {class_name(family)}},
      {"vocab_size", vocab_size},
      {"max_position_embeddings", context},
      {"hidden_size", width},
      {"intermediate_size", inner},
      {"num_hidden_layers", layers},
      {"num_attention_heads", heads},
      {"num_key_value_heads", key_heads},
      {"head_dim", head_dim},
      {family == LlamaFamily::gemma3 ? "hidden_activation" : "hidden_act", activation_of(*this)},
      {"rms_norm_eps", norm_eps},
      {"rope_theta", rotary.theta},
      {"rope_scaling", scaling_of(rotary)},
      {"attention_dropout", attention_dropout},
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_word_embeddings}};
  if (has_attention_bias(family)) object["attention_bias"] = qkv_bias;
  if (family == LlamaFamily::llama) object["mlp_bias"] = inner_bias;
  const int64_t window = windows.empty() ? 0 : *std::max_element(windows.begin(), windows.end());
  if (family == LlamaFamily::mistral) {
    object["sliding_window"] = window > 0 ? Json(window) : Json(nullptr);
  } else if (family != LlamaFamily::llama && family != LlamaFamily::gemma) {
    const bool gemma3 = family == LlamaFamily::gemma3;
    if (gemma3) {
      object["query_pre_attn_scalar"] = query_scalar;
      object["rope_local_base_freq"] = window_rotary->theta;
    } else {
      object["use_sliding_window"] = window > 0;
    }
    object["sliding_window"] = window > 0 ? Json(window) : Json(nullptr);
    if (window > 0 || gemma3) {
      auto types = Json::array();
      for (const int64_t each : windows)
        types.push_back(each > 0 ? "sliding_attention" : "full_attention");
      object["layer_types"] = std::move(types);
    }
  }
  object["pad_token_id"] = padding >= 0 ? Json(padding) : Json(nullptr);
  object.update(Json::parse(token_ids));
  return object.dump(2) + "\n";
}

}  // namespace zero
