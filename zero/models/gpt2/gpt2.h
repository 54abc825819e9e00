// GPT-2 (Radford et al. 2019) as a torch::nn::Module with Hugging Face's parameter names.
//
// B is the batch, T the sequence, C the width, V the vocabulary. A parameter is only ever touched
// by LibTorch operators.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/models/language/decoder.h"
#include "zero/models/layers/attention.h"
#include "zero/models/layers/projection.h"

namespace zero {

/// The sizes of a GPT-2. The default is the 124 M model.
struct Gpt2Config {
  int64_t vocab_size = 50257;
  int64_t context = 1024;  ///< positions that have an embedding: the longest sequence
  int64_t width = 768;     ///< C; a multiple of `heads`
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t inner = 0;  ///< width of the feed-forward layer; 0 means 4 * width
  double embedding_dropout = 0.0;
  double attention_dropout = 0.0;
  double residual_dropout = 0.0;
  double layer_norm_eps = 1e-5;
  double initializer_range = 0.02;  ///< standard deviation of the initial weights
  bool tie_word_embeddings =
      true;                  ///< the output projection is wte.weight; otherwise lm_head.weight
  bool scale_scores = true;  ///< of attention, by the square root of a head's width
  bool scale_scores_by_layer = false;  ///< and by the layer's number, from 1
  /// "gelu_new" (the tanh form), "gelu" (erf), "relu", "silu" or "tanh".
  std::string activation = "gelu_new";
  /// Keys of config.json that mean nothing here and are written as they were read: an object.
  std::string token_ids = "{}";

  /// Sets all three dropout probabilities.
  Gpt2Config& set_dropout(double p);

  /// Throws ConfigError unless the sizes are positive and fit each other, the probabilities are in
  /// [0, 1), and the activation is known.
  void validate() const;

  /// Returns the number of parameters of a model of these sizes; tied embeddings count once.
  int64_t parameter_count() const;
  /// Returns the rows and columns of each parameter of two dimensions.
  std::vector<std::array<int64_t, 2>> matrices() const;

  /// Returns Hugging Face's config.json for a GPT-2. Reading it back gives an equal config.
  std::string to_json() const;

  /// Returns the config that a Hugging Face config.json describes. Keys that are absent take
  /// Hugging Face's defaults (dropout 0.1). The names that every model of transformers has for its
  /// sizes (hidden_size, num_hidden_layers, num_attention_heads, max_position_embeddings) count
  /// before GPT-2's own, as they do there. Throws ConfigError, which names `source`, for malformed
  /// JSON, another model type, a key that Gpt2 does not compute, or sizes that do not validate.
  static Gpt2Config from_json(std::string_view json, std::string_view source);

  /// "gpt2" (124 M), "gpt2-medium", "gpt2-large", "gpt2-xl" or "gpt2-nano" (6 layers, 384 wide, 6
  /// heads), all without dropout, as is usual for pre-training. Throws ConfigError for another
  /// name, with the nearest one.
  static Gpt2Config preset(std::string_view name);
  static const std::vector<std::string>& preset_names();

  bool operator==(const Gpt2Config&) const = default;
};

/// Causal self-attention. (B, T, C) -> (B, T, C).
class Gpt2AttentionImpl : public torch::nn::Cloneable<Gpt2AttentionImpl> {
 public:
  /// `layer` counts from 0.
  Gpt2AttentionImpl(const Gpt2Config& config, int64_t layer);
  void reset() final;
  /// With a cache x follows what is there for the layer, and the mask is one of cached_mask.
  at::Tensor forward(const at::Tensor& x, KeyValueCache* cache = nullptr,
                     const AttentionMask& mask = {});

  Projection c_attn{nullptr};  ///< C -> 3C: queries, keys, values
  Projection c_proj{nullptr};  ///< C -> C

 private:
  Gpt2Config config_;
  size_t layer_;
  std::optional<double> scale_;  // of scores; none: the default
};
TORCH_MODULE(Gpt2Attention);

/// The feed-forward layer. (B, T, C) -> (B, T, C).
class Gpt2MlpImpl : public torch::nn::Cloneable<Gpt2MlpImpl> {
 public:
  explicit Gpt2MlpImpl(const Gpt2Config& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  Projection c_fc{nullptr};    ///< C -> inner
  Projection c_proj{nullptr};  ///< inner -> C

 private:
  Gpt2Config config_;
};
TORCH_MODULE(Gpt2Mlp);

/// One layer: x + attention(norm(x)), then x + mlp(norm(x)). (B, T, C) -> (B, T, C).
class Gpt2BlockImpl : public torch::nn::Cloneable<Gpt2BlockImpl> {
 public:
  Gpt2BlockImpl(const Gpt2Config& config, int64_t layer);
  void reset() final;
  at::Tensor forward(const at::Tensor& x, KeyValueCache* cache = nullptr,
                     const AttentionMask& mask = {});

  torch::nn::LayerNorm ln_1{nullptr};
  Gpt2Attention attn{nullptr};
  torch::nn::LayerNorm ln_2{nullptr};
  Gpt2Mlp mlp{nullptr};

 private:
  Gpt2Config config_;
  int64_t layer_;
};
TORCH_MODULE(Gpt2Block);

/// The language model: Decoder has its functions. Linear layers lie as (in, out), the orientation
/// of Hugging Face's files.
class Gpt2Impl : public torch::nn::Cloneable<Gpt2Impl>, public Decoder {
 public:
  /// Draws GPT-2's initial weights from LibTorch's default generator. ConfigError as
  /// Gpt2Config::validate.
  explicit Gpt2Impl(const Gpt2Config& config);
  void reset() final;

  const Gpt2Config& config() const { return config_; }

  EmbeddingTable wte{nullptr};  ///< (V, C)
  EmbeddingTable wpe{nullptr};  ///< (context, C)
  torch::nn::ModuleList h{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};

 private:
  std::string_view title() const override { return "GPT-2"; }
  int64_t context() const override { return config_.context; }
  std::string_view context_key() const override { return "n_positions"; }
  at::Tensor embed_tokens(const at::Tensor& tokens, const at::Tensor& slot,
                          const Places& places) override;
  std::vector<Block> blocks(const at::Tensor& tokens, KeyValueCache* cache,
                            const std::shared_ptr<const Documents>& documents) override;
  at::Tensor normed(const at::Tensor& hidden) override;
  const at::Tensor& input_weight() const override { return wte->weight; }
  const at::Tensor& output_weight() const override;
  std::shared_ptr<Decoder> self() override;

  Gpt2Config config_;
  EmbeddingTable lm_head_{nullptr};  ///< only when not tied; holds lm_head.weight
};
TORCH_MODULE(Gpt2);

}  // namespace zero
