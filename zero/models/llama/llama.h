// Llama (Touvron et al., arXiv 2302.13971) and its relatives as a torch::nn::Module with Hugging
// Face's parameter names: Llama 2 and 3, Qwen 2 and 3, Mistral, Gemma 1 and 3.
//
// B is the batch, T the sequence, C the width, V the vocabulary, H and K the heads of queries and
// of keys, D their width. A parameter is only ever touched by LibTorch operators.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "zero/models/language/decoder.h"
#include "zero/models/layers/attention.h"
#include "zero/models/layers/projection.h"
#include "zero/models/layers/rms_norm.h"
#include "zero/models/layers/rotary.h"
#include "zero/models/llama/llama_config.h"

namespace zero {

/// Causal self-attention with rotary positions. (B, T, C) -> (B, T, C).
class LlamaAttentionImpl : public torch::nn::Cloneable<LlamaAttentionImpl> {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  void reset() final;
  /// `table` is of T positions, and `mask` the layer's. With a cache x follows what is there in
  /// `layer`, and the mask is one of cached_mask.
  at::Tensor forward(const at::Tensor& x, const RotaryTable& table, const AttentionMask& mask,
                     KeyValueCache* cache = nullptr, size_t layer = 0);

  Projection q_proj{nullptr};  ///< C -> H D
  Projection k_proj{nullptr};  ///< C -> K D
  Projection v_proj{nullptr};  ///< C -> K D
  Projection o_proj{nullptr};  ///< H D -> C
  RmsNorm q_norm{nullptr};     ///< of each head, where LlamaConfig::head_norms
  RmsNorm k_norm{nullptr};

 private:
  LlamaConfig config_;
};
TORCH_MODULE(LlamaAttention);

/// The feed-forward layer with a gate. (B, T, C) -> (B, T, C).
class LlamaMlpImpl : public torch::nn::Cloneable<LlamaMlpImpl> {
 public:
  explicit LlamaMlpImpl(const LlamaConfig& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  Projection gate_proj{nullptr};  ///< C -> inner
  Projection up_proj{nullptr};    ///< C -> inner
  Projection down_proj{nullptr};  ///< inner -> C

 private:
  LlamaConfig config_;
};
TORCH_MODULE(LlamaMlp);

/// One layer: x + attention(norm(x)), then x + mlp(norm(x)). With LlamaConfig::branch_norms what is
/// added is normed too. (B, T, C) -> (B, T, C).
class LlamaBlockImpl : public torch::nn::Cloneable<LlamaBlockImpl> {
 public:
  explicit LlamaBlockImpl(const LlamaConfig& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x, const RotaryTable& table, const AttentionMask& mask,
                     KeyValueCache* cache = nullptr, size_t layer = 0);

  LlamaAttention self_attn{nullptr};
  LlamaMlp mlp{nullptr};
  RmsNorm input_layernorm{nullptr};
  RmsNorm post_attention_layernorm{nullptr};   ///< before mlp; of a normed branch, behind attention
  RmsNorm pre_feedforward_layernorm{nullptr};  ///< these two where branches are normed
  RmsNorm post_feedforward_layernorm{nullptr};

 private:
  LlamaConfig config_;
};
TORCH_MODULE(LlamaBlock);

/// The part of the language model whose parameters are called `model`.
class LlamaBodyImpl : public torch::nn::Cloneable<LlamaBodyImpl> {
 public:
  explicit LlamaBodyImpl(const LlamaConfig& config);
  void reset() final;

  EmbeddingTable embed_tokens{nullptr};  ///< (V, C)
  torch::nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};

 private:
  LlamaConfig config_;
};
TORCH_MODULE(LlamaBody);

/// The language model: Decoder has its functions.
class LlamaImpl : public torch::nn::Cloneable<LlamaImpl>, public Decoder {
 public:
  /// Draws initial weights from LibTorch's default generator. ConfigError as
  /// LlamaConfig::validate.
  explicit LlamaImpl(const LlamaConfig& config);
  void reset() final;

  const LlamaConfig& config() const { return config_; }

  LlamaBody model{nullptr};
  EmbeddingTable lm_head{nullptr};  ///< (V, C); only when not tied

 private:
  std::string_view title() const override { return model_type(config_.family); }
  int64_t context() const override { return config_.longest(); }
  std::string_view context_key() const override { return "max_position_embeddings"; }
  at::Tensor embed_tokens(const at::Tensor& tokens, const at::Tensor& slot,
                          const Places& places) override;
  std::vector<Block> blocks(const at::Tensor& tokens, KeyValueCache* cache,
                            const std::shared_ptr<const Documents>& documents) override;
  at::Tensor normed(const at::Tensor& hidden) override { return model->norm(hidden); }
  const at::Tensor& input_weight() const override { return model->embed_tokens->weight; }
  const at::Tensor& output_weight() const override;
  std::shared_ptr<Decoder> self() override;

  LlamaConfig config_;
};
TORCH_MODULE(Llama);

}  // namespace zero
