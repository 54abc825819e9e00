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
#include <string>
#include <string_view>
#include <vector>

#include "zero/models/language/layer_sequence.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/recompute/recompute.h"

namespace zero {

struct LinearCrossEntropyOptions;

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
      true;  ///< the output projection is wte.weight; otherwise lm_head.weight

  /// Sets all three dropout probabilities.
  Gpt2Config& set_dropout(double p);

  /// Throws ConfigError unless the sizes are positive and fit each other and the probabilities are
  /// in [0, 1).
  void validate() const;

  /// The number of parameters of a model of these sizes; tied embeddings count once.
  int64_t parameter_count() const;
  /// Rows and columns of each parameter of two dimensions.
  std::vector<std::array<int64_t, 2>> matrices() const;

  /// Hugging Face's config.json for a GPT-2: reading it back gives an equal config.
  std::string to_json() const;

  /// The config that a Hugging Face config.json describes. Keys that are absent take Hugging Face's
  /// defaults (dropout 0.1); keys that do not bear on the model are ignored. ConfigError, which
  /// names `source`, for malformed JSON, another model type, a variant that Gpt2 does not compute,
  /// or sizes that do not validate.
  static Gpt2Config from_json(std::string_view json, std::string_view source);

  /// "gpt2" (124 M), "gpt2-medium", "gpt2-large", "gpt2-xl" or "gpt2-nano" (6 layers, 384 wide, 6
  /// heads), all without dropout, as is usual for pre-training. ConfigError for another name, with
  /// the nearest one.
  static Gpt2Config preset(std::string_view name);
  static const std::vector<std::string>& preset_names();

  bool operator==(const Gpt2Config&) const = default;
};

/// y = x W + b with W as (in, out), the orientation of Hugging Face's GPT-2 files. (…, in) -> (…,
/// out).
class Conv1dImpl : public torch::nn::Cloneable<Conv1dImpl>, public Tileable {
 public:
  /// Weights are drawn from N(0, deviation^2); the bias is zero.
  Conv1dImpl(int64_t in, int64_t out, double deviation);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);
  /// forward(tanh_gelu(x)), keeping less for backward where the weight is whole (linear.h).
  at::Tensor forward_of_gelu(const at::Tensor& x);
  bool tile(int64_t max_elements) override;

  at::Tensor weight;           ///< (in, out); undefined in tiles
  at::Tensor bias;             ///< (out); undefined in tiles
  TiledLinear tiles{nullptr};  ///< in place of both

 private:
  int64_t in_;
  int64_t out_;
  double deviation_;
  int64_t tile_elements_ = 0;  // 0: whole
};
TORCH_MODULE(Conv1d);

/// A table of vectors. (…) int64 -> (…, C).
class Gpt2EmbeddingImpl : public torch::nn::Cloneable<Gpt2EmbeddingImpl> {
 public:
  /// Weights are drawn from N(0, deviation^2).
  Gpt2EmbeddingImpl(int64_t rows, int64_t width, double deviation);
  void reset() final;
  at::Tensor forward(const at::Tensor& indices);

  at::Tensor weight;  ///< (rows, C)

 private:
  int64_t rows_;
  int64_t width_;
  double deviation_;
};
TORCH_MODULE(Gpt2Embedding);

/// Causal self-attention. (B, T, C) -> (B, T, C).
class Gpt2AttentionImpl : public torch::nn::Cloneable<Gpt2AttentionImpl> {
 public:
  explicit Gpt2AttentionImpl(const Gpt2Config& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  Conv1d c_attn{nullptr};  ///< C -> 3C: queries, keys, values
  Conv1d c_proj{nullptr};  ///< C -> C

 private:
  Gpt2Config config_;
};
TORCH_MODULE(Gpt2Attention);

/// The feed-forward layer, GELU in its tanh form. (B, T, C) -> (B, T, C).
class Gpt2MlpImpl : public torch::nn::Cloneable<Gpt2MlpImpl> {
 public:
  explicit Gpt2MlpImpl(const Gpt2Config& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  Conv1d c_fc{nullptr};    ///< C -> inner
  Conv1d c_proj{nullptr};  ///< inner -> C

 private:
  Gpt2Config config_;
};
TORCH_MODULE(Gpt2Mlp);

/// One layer: x + attention(norm(x)), then x + mlp(norm(x)). (B, T, C) -> (B, T, C).
class Gpt2BlockImpl : public torch::nn::Cloneable<Gpt2BlockImpl> {
 public:
  explicit Gpt2BlockImpl(const Gpt2Config& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm ln_1{nullptr};
  Gpt2Attention attn{nullptr};
  torch::nn::LayerNorm ln_2{nullptr};
  Gpt2Mlp mlp{nullptr};

 private:
  Gpt2Config config_;
};
TORCH_MODULE(Gpt2Block);

/// The language model. `tokens` and `targets` are int64; all functions throw ConfigError for
/// another dtype or shape or for a sequence longer than the context.
class Gpt2Impl : public torch::nn::Cloneable<Gpt2Impl> {
 public:
  /// Draws GPT-2's initial weights from LibTorch's default generator. ConfigError as
  /// Gpt2Config::validate.
  explicit Gpt2Impl(const Gpt2Config& config);
  void reset() final;

  /// The hidden states after the last norm. (B, T) -> (B, T, C).
  at::Tensor forward(const at::Tensor& tokens);

  /// The mean cross-entropy in nats over the targets that are not -100, an fp32 scalar. (B, T), (B,
  /// T) -> ().
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  /// The model as layers, for the micro-batches of a step: `tokens[i]` and `targets[i]` as `loss`
  /// takes them, all of one shape. The embeddings of all micro-batches are computed together; each
  /// block is a layer. Holds the model's modules.
  LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets);

  /// Unnormalised log-probabilities. (B, T) -> (B, T, V).
  at::Tensor logits(const at::Tensor& tokens);

  /// The same for the last position only. (B, T) -> (B, V).
  at::Tensor logits_last(const at::Tensor& tokens);

  const Gpt2Config& config() const { return config_; }

  /// From the next forward on. Losses and gradients stay the same to the bit. ConfigError for a
  /// negative `every`.
  void recompute(RecomputeSettings settings);
  const RecomputeSettings& recompute() const { return recompute_; }

  Gpt2Embedding wte{nullptr};  ///< (V, C)
  Gpt2Embedding wpe{nullptr};  ///< (context, C)
  torch::nn::ModuleList h{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};

 private:
  /// The hidden states before the last norm. (B, T) -> (B, T, C). `slot`: see tied_embedding.h.
  at::Tensor body(const at::Tensor& tokens, const at::Tensor& slot = {});
  /// The hidden states before the first block. (B, T) -> (B, T, C).
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& slot = {});
  /// `hidden` is (B, T, C), before the last norm.
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& targets,
                     const LinearCrossEntropyOptions& options);
  static void check_targets(const at::Tensor& tokens, const at::Tensor& targets);
  /// (V, C): wte.weight or lm_head.weight.
  const at::Tensor& output_weight() const;

  Gpt2Config config_;
  RecomputeSettings recompute_;
  Gpt2Embedding lm_head_{nullptr};  ///< only when not tied; holds lm_head.weight
};
TORCH_MODULE(Gpt2);

}  // namespace zero
