// The interface of models that read a whole text at once, in both directions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/models/language/layer_sequence.h"

namespace zero {

/// Says what a model computes behind its last layer.
enum class Head : uint8_t {
  next_token,    ///< logits of the token behind each
  masked_token,  ///< logits of the token at each place
  classes        ///< logits of the classes of a text
};

/// Texts side by side: B texts of at most T tokens.
struct Texts {
  at::Tensor tokens;   ///< (B, T) int64
  at::Tensor types{};  ///< (B, T) int64: 1 in the second text of a pair; undefined: all are 0
  at::Tensor mask{};   ///< (B, T) bool: false where there is padding; undefined: there is none
};

/// The functions that encoders have beside those of LanguageModel. They throw ConfigError for
/// another dtype or shape, a sequence beyond the context, or a type that the model does not have.
class Encoder {
 public:
  Encoder() = default;
  Encoder(const Encoder&) = default;
  Encoder& operator=(const Encoder&) = default;
  virtual ~Encoder() = default;

  /// Unnormalised log-probabilities: (B, T, V) of a masked_token, (B, classes) of classes.
  virtual at::Tensor logits(const Texts& texts) = 0;
  /// The mean cross-entropy in nats over the targets that are not -100, an fp32 scalar. Targets are
  /// (B, T) int64 of a masked_token, (B) of classes.
  virtual at::Tensor loss(const Texts& texts, const at::Tensor& targets) = 0;
  /// The model as layers, for micro-batches that pass together; their texts may have several
  /// lengths.
  virtual LayerSequence layers(std::vector<Texts> texts, std::vector<at::Tensor> targets) = 0;
};

}  // namespace zero
