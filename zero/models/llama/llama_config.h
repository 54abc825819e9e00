// The sizes of a model of Llama's kind, and what its relatives do otherwise.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/models/layers/rotary.h"

namespace zero {

/// The model types of config.json that this architecture computes. They differ in which values a
/// config.json leaves out, and in what LlamaConfig has of biases, norms and windows.
enum class LlamaFamily : uint8_t { llama, qwen2, qwen3, mistral, gemma, gemma3 };

struct LlamaConfig {
  LlamaFamily family = LlamaFamily::llama;
  int64_t vocab_size = 32000;
  int64_t context = 2048;  ///< max_position_embeddings
  int64_t width = 4096;    ///< C
  int64_t inner = 11008;   ///< width of the feed-forward layer
  int64_t layers = 32;
  int64_t heads = 32;      ///< H, of queries
  int64_t key_heads = 32;  ///< K, of keys and values; H is a multiple of it
  int64_t head_dim = 128;  ///< D; H D may differ from C
  double norm_eps = 1e-6;
  bool qkv_bias = false;      ///< of the projections of queries, keys and values
  bool output_bias = false;   ///< of the projection behind attention
  bool inner_bias = false;    ///< of the feed-forward layer
  bool head_norms = false;    ///< each query and key is normed before it is turned
  bool branch_norms = false;  ///< what a branch adds is normed too
  /// Norms multiply by 1 + weight, embeddings are multiplied by the root of C, which is rounded to
  /// their dtype, and gates are GELU in its tanh form.
  bool gemma = false;
  int64_t query_scalar = 0;  ///< attention's scores are divided by its root; 0: by that of D
  bool tie_word_embeddings = false;
  double attention_dropout = 0.0;
  double initializer_range = 0.02;
  int64_t padding = -1;  ///< the token whose embedding is not trained; -1: none
  RotaryOptions rotary{};
  std::optional<RotaryOptions> window_rotary{};  ///< of layers with a window; none: `rotary`
  /// By layer: a position sees itself and the window - 1 before; 0: all before.
  std::vector<int64_t> windows{};
  /// Keys of config.json that mean nothing here and are written as they were read: an object.
  std::string token_ids = "{}";

  /// Throws ConfigError unless the sizes are positive and fit each other.
  void validate() const;
  /// Returns the length of the longest sequence: the context, times the factor of a dynamic rotary
  /// embedding.
  int64_t longest() const;
  /// Returns the number of parameters of a model of these sizes; tied embeddings count once.
  int64_t parameter_count() const;
  /// Returns the rows and columns of each parameter of two dimensions.
  std::vector<std::array<int64_t, 2>> matrices() const;

  /// Returns Hugging Face's config.json. Reading it back gives an equal config.
  std::string to_json() const;
  /// Returns the config that a Hugging Face config.json describes. Keys that are absent take the
  /// defaults of transformers' class. Throws ConfigError, which names `source` and the key, for
  /// malformed JSON, another model type, a key that the model does not compute, or sizes that do
  /// not validate.
  static LlamaConfig from_json(std::string_view json, std::string_view source);

  bool operator==(const LlamaConfig&) const = default;
};

/// Returns the model_type of config.json.
std::string_view model_type(LlamaFamily family);
/// Returns the name of transformers' class: "Qwen3ForCausalLM".
std::string_view class_name(LlamaFamily family);

}  // namespace zero
