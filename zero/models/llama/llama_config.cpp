#include "zero/models/llama/llama_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "zero/base/error.h"
#include "zero/models/language/config_checks.h"

namespace zero {

void LlamaConfig::validate() const {
  check_sizes("The model", {{"vocab_size", vocab_size, LargestSizes::vocabulary},
                            {"max_position_embeddings", context, LargestSizes::context},
                            {"hidden_size", width, LargestSizes::width},
                            {"intermediate_size", inner, LargestSizes::inner},
                            {"num_hidden_layers", layers, LargestSizes::layers},
                            {"num_attention_heads", heads, LargestSizes::heads},
                            {"num_key_value_heads", key_heads, LargestSizes::heads},
                            {"head_dim", head_dim, LargestSizes::head_dim}});
  if (heads % key_heads != 0) {
    throw ConfigError(
        fmt::format("The model's num_attention_heads of {} is not a multiple of its "
                    "num_key_value_heads of {}. Give heads that share keys evenly.",
                    heads, key_heads));
  }
  if (head_dim % 2 != 0) {
    throw ConfigError(fmt::format(
        "The model's head_dim is {}; it must be even, since its halves are turned.", head_dim));
  }
  if (!(norm_eps > 0))
    throw ConfigError(
        fmt::format("The model's rms_norm_eps is {}; it must be positive.", norm_eps));
  if (!(initializer_range >= 0)) {
    throw ConfigError(fmt::format("The model's initializer_range is {}; it must not be negative.",
                                  initializer_range));
  }
  check_probability("The model", "attention_dropout", attention_dropout);
  if (padding >= vocab_size) {
    throw ConfigError(fmt::format(
        "The model's pad_token_id is {}, which its vocabulary of {} tokens does not have.", padding,
        vocab_size));
  }
  for (const auto& each : {rotary, window_rotary.value_or(rotary)}) {
    if (each.theta > 0 && each.factor > 0) continue;
    throw ConfigError(
        fmt::format("The model's rope_theta is {} and the factor of its rope_scaling {}; both must "
                    "be positive.",
                    each.theta, each.factor));
  }
  if (query_scalar < 0) {
    throw ConfigError(
        fmt::format("The model's query_pre_attn_scalar is {}; it must be positive, since scores "
                    "are divided by its root.",
                    query_scalar));
  }
  if (rotary.kind == RotaryKind::llama3 &&
      !(rotary.low_frequency_factor > 0 &&
        rotary.high_frequency_factor > rotary.low_frequency_factor)) {
    throw ConfigError(
        fmt::format("The model's rope_scaling has a low_freq_factor of {} and a high_freq_factor "
                    "of {}; the second must be the larger one, and both positive.",
                    rotary.low_frequency_factor, rotary.high_frequency_factor));
  }
  if (rotary.kind == RotaryKind::dynamic && head_dim < 4)
    throw ConfigError("A dynamic rope_scaling needs a head_dim of at least 4.");
}

int64_t LlamaConfig::longest() const {
  if (rotary.kind != RotaryKind::dynamic) return context;
  return std::llround(std::floor(static_cast<double>(context) * std::max(rotary.factor, 1.0)));
}

std::vector<std::array<int64_t, 2>> LlamaConfig::matrices() const {
  std::vector<std::array<int64_t, 2>> all{{vocab_size, width}};
  if (!tie_word_embeddings) all.push_back({vocab_size, width});
  const int64_t queries = heads * head_dim;
  const int64_t keys = key_heads * head_dim;
  for (int64_t layer = 0; layer < layers; ++layer) {
    all.insert(all.end(), {{queries, width},
                           {keys, width},
                           {keys, width},
                           {width, queries},
                           {inner, width},
                           {inner, width},
                           {width, inner}});
  }
  return all;
}

int64_t LlamaConfig::parameter_count() const {
  int64_t layer = (branch_norms ? 4 : 2) * width;  // norms
  if (qkv_bias) layer += (heads + 2 * key_heads) * head_dim;
  if (output_bias) layer += width;
  if (inner_bias) layer += 2 * inner + width;
  if (head_norms) layer += 2 * head_dim;
  int64_t count = layers * layer + width;
  for (const auto [rows, columns] : matrices()) count += rows * columns;
  return count;
}

}  // namespace zero
