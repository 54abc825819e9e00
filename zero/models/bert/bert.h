// BERT (Devlin et al., arXiv 1810.04805) as a torch::nn::Module with Hugging Face's parameter
// names: BertForMaskedLM and BertForSequenceClassification.
//
// B is the batch, T the sequence, C the width, V the vocabulary. A parameter is only ever touched
// by LibTorch operators.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/models/bert/bert_config.h"
#include "zero/models/language/encoder.h"
#include "zero/models/layers/projection.h"
#include "zero/models/recompute/recompute.h"

namespace zero {

/// The sum of three embeddings, normed. (B, T) -> (B, T, C).
class BertEmbeddingsImpl : public torch::nn::Cloneable<BertEmbeddingsImpl> {
 public:
  explicit BertEmbeddingsImpl(const BertConfig& config);
  void reset() final;
  /// `slot`: see tied_embedding.h.
  at::Tensor forward(const Texts& texts, const at::Tensor& slot);

  EmbeddingTable word_embeddings{nullptr};        ///< (V, C)
  EmbeddingTable position_embeddings{nullptr};    ///< (context, C)
  EmbeddingTable token_type_embeddings{nullptr};  ///< (types, C)
  torch::nn::LayerNorm norm{nullptr};             ///< "LayerNorm"

 private:
  BertConfig config_;
};
TORCH_MODULE(BertEmbeddings);

/// Attention in both directions. (B, T, C) -> (B, T, C).
class BertSelfAttentionImpl : public torch::nn::Cloneable<BertSelfAttentionImpl> {
 public:
  explicit BertSelfAttentionImpl(const BertConfig& config);
  void reset() final;
  /// `mask` (B, 1, 1, T) says which tokens are seen; undefined: all.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);

  Projection query{nullptr};
  Projection key{nullptr};
  Projection value{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertSelfAttention);

/// A linear layer and a norm, which lie together in the files: the end of a branch, and the
/// transform before the tokens' logits.
class BertDenseNormImpl : public torch::nn::Cloneable<BertDenseNormImpl> {
 public:
  BertDenseNormImpl(const BertConfig& config, int64_t in);
  void reset() final;
  /// norm(y + residual) of y = dense(x), with dropout of y. (..., C) -> (..., C).
  at::Tensor end_branch(const at::Tensor& y, const at::Tensor& residual);
  /// norm(activation(dense(x))). (..., C) -> (..., C).
  at::Tensor transform(const at::Tensor& x);

  Projection dense{nullptr};
  torch::nn::LayerNorm norm{nullptr};  ///< "LayerNorm"

 private:
  BertConfig config_;
  int64_t in_;
};
TORCH_MODULE(BertDenseNorm);

/// The attention of a layer: "self" and "output".
class BertAttentionImpl : public torch::nn::Cloneable<BertAttentionImpl> {
 public:
  explicit BertAttentionImpl(const BertConfig& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);

  BertSelfAttention self{nullptr};
  BertDenseNorm output{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertAttention);

/// A module of one linear layer, "dense".
class BertDenseImpl : public torch::nn::Cloneable<BertDenseImpl> {
 public:
  BertDenseImpl(const BertConfig& config, int64_t out);
  void reset() final;
  at::Tensor forward(const at::Tensor& x) { return dense(x); }

  Projection dense{nullptr};

 private:
  BertConfig config_;
  int64_t out_;
};
TORCH_MODULE(BertDense);

/// One layer: x = norm(x + attention(x)), then norm(x + feed-forward(x)). (B, T, C) -> (B, T, C).
class BertLayerImpl : public torch::nn::Cloneable<BertLayerImpl> {
 public:
  explicit BertLayerImpl(const BertConfig& config);
  void reset() final;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);

  BertAttention attention{nullptr};
  BertDense intermediate{nullptr};
  BertDenseNorm output{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertLayer);

/// The stack of layers.
class BertEncoderImpl : public torch::nn::Cloneable<BertEncoderImpl> {
 public:
  explicit BertEncoderImpl(const BertConfig& config);
  void reset() final;

  torch::nn::ModuleList layer{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertEncoder);

/// The part of the model whose parameters are called `bert`: embeddings, layers and, before
/// classes, the pooler.
class BertBodyImpl : public torch::nn::Cloneable<BertBodyImpl> {
 public:
  explicit BertBodyImpl(const BertConfig& config);
  void reset() final;

  BertEmbeddings embeddings{nullptr};
  BertEncoder encoder{nullptr};
  BertDense pooler{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertBody);

/// The part of a masked language model behind its layers, but for the decoder, which is the
/// embedding.
class BertPredictionsImpl : public torch::nn::Cloneable<BertPredictionsImpl> {
 public:
  explicit BertPredictionsImpl(const BertConfig& config);
  void reset() final;

  BertDenseNorm transform{nullptr};
  at::Tensor bias;  ///< (V)

 private:
  BertConfig config_;
};
TORCH_MODULE(BertPredictions);

/// The head of a masked language model.
class BertMaskedHeadImpl : public torch::nn::Cloneable<BertMaskedHeadImpl> {
 public:
  explicit BertMaskedHeadImpl(const BertConfig& config);
  void reset() final;

  BertPredictions predictions{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertMaskedHead);

/// The model, with the head that its config says.
class BertImpl : public torch::nn::Cloneable<BertImpl>, public Encoder {
 public:
  /// Draws initial weights from LibTorch's default generator; those of the head in a WithoutValues
  /// scope too. ConfigError as BertConfig::validate.
  explicit BertImpl(const BertConfig& config);
  void reset() final;

  const BertConfig& config() const { return config_; }

  at::Tensor logits(const Texts& texts) override;
  at::Tensor loss(const Texts& texts, const at::Tensor& targets) override;
  LayerSequence layers(std::vector<Texts> texts, std::vector<at::Tensor> targets) override;
  /// The hidden states behind the last layer. (B, T) -> (B, T, C).
  at::Tensor forward(const Texts& texts);

  /// From the next forward on. Losses and gradients stay the same to the bit. ConfigError for a
  /// negative `every`.
  void recompute(RecomputeSettings settings);

  BertBody bert{nullptr};
  BertMaskedHead cls{nullptr};
  Projection classifier{nullptr};  ///< C -> classes

 private:
  void check(const Texts& texts) const;
  void check_targets(const Texts& texts, const at::Tensor& targets) const;
  at::Tensor body(const Texts& texts, const at::Tensor& slot);
  at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& targets, const at::Tensor& slot);
  at::Tensor class_logits(const at::Tensor& hidden);

  BertConfig config_;
  RecomputeSettings recompute_;
};
TORCH_MODULE(Bert);

}  // namespace zero
