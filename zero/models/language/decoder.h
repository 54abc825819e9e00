// The common part of language models that decode: embeddings, a stack of blocks, a last norm, and
// an output projection that may be the embedding itself.
//
// B is the batch, T the sequence, C the width, V the vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "zero/models/language/layer_sequence.h"
#include "zero/models/layers/documents.h"
#include "zero/models/recompute/recompute.h"

namespace zero {

class KeyValueCache;
struct LinearCrossEntropyOptions;

/// Is a part of a module: an architecture derives from it and from torch::nn::Module. `tokens` and
/// `targets` are int64. All functions throw ConfigError for another dtype or shape or for a
/// sequence longer than the context.
class Decoder {
 public:
  Decoder() = default;
  Decoder(const Decoder&) = default;
  Decoder& operator=(const Decoder&) = default;
  virtual ~Decoder() = default;

  /// Returns the hidden states after the last norm. (B, T) -> (B, T, C). `positions`, (B, T) int64,
  /// say that a row packs several documents (documents_in): a token has its position in its own
  /// document, and sees nothing of the others. Undefined: each row is one document.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions = {}) {
    return normed(body(tokens, positions));
  }

  /// Returns the mean cross-entropy in nats over the targets that are not -100, an fp32 scalar. (B,
  /// T), (B, T) -> (). `positions` are as in `forward`.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const at::Tensor& positions = {});

  /// Returns the model as layers, for the micro-batches of a step: `tokens[i]`, `targets[i]` and
  /// `positions[i]` as `loss` takes them, all of one shape; `positions` may be empty. The
  /// embeddings of all micro-batches are computed together; each block is a layer. Holds the
  /// model's modules.
  LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets,
                       const std::vector<at::Tensor>& positions = {});

  /// Returns unnormalised log-probabilities. (B, T) -> (B, T, V). `positions` are as in `forward`.
  at::Tensor logits(const at::Tensor& tokens, const at::Tensor& positions = {});

  /// Returns the same for the last position only. (B, T) -> (B, V).
  at::Tensor logits_last(const at::Tensor& tokens);

  /// Returns the same for several texts: tokens[i], (B, T), follow those whose keys and values are
  /// in caches[i], which then has those of the tokens too. Each text is computed by itself, and all
  /// of them pass a block before the next, so stage 3 gathers a block once. The sums of attention
  /// run in another order than without a cache.
  std::vector<at::Tensor> logits_next(const std::vector<at::Tensor>& tokens,
                                      const std::vector<KeyValueCache*>& caches);

  /// Has an effect from the next forward on. Losses and gradients stay the same to the bit. Throws
  /// ConfigError for a negative `every`.
  void recompute(RecomputeSettings settings);
  const RecomputeSettings& recompute() const { return recompute_; }

 protected:
  /// A function (B, T, C) -> (B, T, C), which keeps to what zero::recompute says of functions.
  using Block = std::function<at::Tensor(const at::Tensor&)>;

  /// Returns the architecture's name, for people: "GPT-2".
  virtual std::string_view title() const = 0;
  /// Returns the longest sequence, and the key of config.json that says so.
  virtual int64_t context() const = 0;
  virtual std::string_view context_key() const = 0;
  /// Says where the tokens of a batch stand: in documents, or in rows whose first token has the
  /// position `first`.
  struct Places {
    int64_t first = 0;
    std::shared_ptr<const Documents> documents{};
  };
  /// Computes the hidden states before the first block of tokens that were checked. (B, T) -> (B,
  /// T, C). `slot`: see tied_embedding.h.
  virtual at::Tensor embed_tokens(const at::Tensor& tokens, const at::Tensor& slot,
                                  const Places& places) = 0;
  /// Returns the blocks for sequences as long as those of `tokens`, and for their documents where
  /// there are some. They hold the modules, and use `cache`, which outlives them, where there is
  /// one; there are no documents then.
  virtual std::vector<Block> blocks(const at::Tensor& tokens, KeyValueCache* cache,
                                    const std::shared_ptr<const Documents>& documents) = 0;
  /// Applies the last norm. (..., C) -> (..., C).
  virtual at::Tensor normed(const at::Tensor& hidden) = 0;
  /// Return the tables of the embedding and of the output projection, (V, C) each: one tensor where
  /// they are tied.
  virtual const at::Tensor& input_weight() const = 0;
  virtual const at::Tensor& output_weight() const = 0;
  /// Returns a pointer that keeps the module.
  virtual std::shared_ptr<Decoder> self() = 0;

 private:
  /// Returns the hidden states before the last norm. (B, T) -> (B, T, C).
  at::Tensor body(const at::Tensor& tokens, const at::Tensor& positions,
                  const at::Tensor& slot = {});
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& slot, const Places& places);
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& targets,
                     const LinearCrossEntropyOptions& options);
  void check_targets(const at::Tensor& tokens, const at::Tensor& targets) const;
  bool tied() const { return input_weight().is_same(output_weight()); }

  RecomputeSettings recompute_;
};

}  // namespace zero
