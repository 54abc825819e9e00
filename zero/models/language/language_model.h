// The interface that training, generation and export need of a language model of any architecture.
//
// An architecture is a file that implements the two classes below, and a line in
// models/architectures.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/tensor_place.h"
#include "zero/models/language/encoder.h"
#include "zero/models/language/layer_sequence.h"
#include "zero/models/layers/key_value_cache.h"
#include "zero/models/recompute/recompute.h"

namespace zero {

class LanguageModel;

/// Bytes that a forward pass keeps for backward, as far as they are known beforehand.
struct ActivationBytes {
  int64_t layer = 0;        ///< each layer
  int64_t layer_input = 0;  ///< of those, what enters it: all that a recomputed one keeps
  int64_t loss = 0;         ///< the output projection and the loss
};

/// A language model's sizes.
class LanguageModelConfig {
 public:
  LanguageModelConfig() = default;
  LanguageModelConfig(const LanguageModelConfig&) = delete;
  LanguageModelConfig& operator=(const LanguageModelConfig&) = delete;
  virtual ~LanguageModelConfig() = default;

  virtual int64_t vocab_size() const = 0;
  virtual void set_vocab_size(int64_t tokens) = 0;
  /// Returns whether the vocabulary should be that of the data, since nobody has published weights
  /// of these sizes.
  virtual bool takes_vocabulary_of_data() const = 0;
  /// Returns the length of the longest sequence.
  virtual int64_t context() const = 0;
  /// Returns how many layers LanguageModel::layers gives.
  virtual int64_t layers() const = 0;
  /// Return the number of parameters, and the elements of the largest.
  virtual int64_t parameter_count() const = 0;
  virtual int64_t largest_parameter() const = 0;
  /// Returns the rows and columns of each parameter of two dimensions.
  virtual std::vector<std::array<int64_t, 2>> matrices() const = 0;
  /// Returns the bytes of the activations of a micro-batch of so many tokens, in elements of so
  /// many bytes.
  virtual ActivationBytes activation_bytes(int64_t tokens, int64_t element_bytes) const = 0;
  /// Returns what the model's head predicts.
  virtual Head head() const { return Head::next_token; }
  /// Returns the names of the classes by number; empty for another head.
  virtual std::vector<std::string> labels() const { return {}; }
  /// Gives the model another head; `labels` names its classes, and is empty for another head.
  /// Throws ConfigError where these models do not have it.
  virtual void set_head(Head head, std::vector<std::string> labels);
  /// Returns the token that fills texts up; -1: none is known.
  virtual int64_t padding() const { return -1; }
  /// Sets the probability of every dropout.
  virtual void set_dropout(double probability) = 0;
  /// Throws ConfigError, naming the value, for sizes that make no model.
  virtual void validate() const = 0;
  /// Hugging Face's config.json, which Architecture::from_json reads back to equal sizes.
  virtual std::string to_json() const = 0;
  /// Returns a description for people, as "12 layers, 768 wide".
  virtual std::string description() const = 0;
  /// Returns a model of these sizes, its weights drawn from LibTorch's default generator. Throws
  /// ConfigError as `validate`.
  virtual std::unique_ptr<LanguageModel> build() const = 0;
};

/// A language model. B is the batch, T the sequence, V the vocabulary; tokens and targets are
/// int64. The functions throw ConfigError for another dtype or shape, or a sequence beyond the
/// context.
class LanguageModel {
 public:
  LanguageModel() = default;
  LanguageModel(const LanguageModel&) = delete;
  LanguageModel& operator=(const LanguageModel&) = delete;
  virtual ~LanguageModel() = default;

  /// Returns the module, whose parameters are under the names of checkpoints.
  virtual torch::nn::Module& module() = 0;
  virtual const LanguageModelConfig& config() const = 0;
  /// Returns the mean cross-entropy in nats over the targets that are not -100, an fp32 scalar. (B,
  /// T), (B, T) -> (). `positions`, (B, T) int64, say that rows pack several documents, which do
  /// not see each other (Decoder::forward); undefined: each row is one. An encoder takes none.
  virtual at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                          const at::Tensor& positions = {}) = 0;
  /// Returns the model as layers, for micro-batches that pass together: `tokens[i]`, `targets[i]`
  /// and `positions[i]` as `loss` takes them, all of one shape; `positions` may be empty.
  virtual LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets,
                               const std::vector<at::Tensor>& positions = {}) = 0;
  /// Returns unnormalised log-probabilities of what `loss` compares with targets. (B, T) -> (B, T,
  /// V).
  virtual at::Tensor logits(const at::Tensor& tokens, const at::Tensor& positions = {}) = 0;
  /// Returns those of the token behind the last. (B, T) -> (B, V). Throws ConfigError for an
  /// encoder, as logits_next does.
  virtual at::Tensor logits_last(const at::Tensor& tokens) = 0;
  /// Returns the same for tokens that follow those in `cache` (Decoder::logits_next).
  at::Tensor logits_next(const at::Tensor& tokens, KeyValueCache& cache);
  /// Does the same for several texts of any lengths, each with a cache of its own and by itself, so
  /// that its logits do not depend on the others. All of them pass a layer before the next.
  virtual std::vector<at::Tensor> logits_next_of(const std::vector<at::Tensor>& tokens,
                                                 const std::vector<KeyValueCache*>& caches) = 0;
  /// Sets which layers `loss` recomputes in backward, from the next time on. Throws ConfigError for
  /// a negative `every`.
  virtual void recompute(RecomputeSettings settings) = 0;
  /// Returns places by the parameters' names; a parameter that is absent is exported whole, under
  /// its own name. The parameters of one tensor come one after the other.
  virtual std::map<std::string, TensorPlace> export_places() = 0;
  /// Names that other programs' files may have beside those of parameters, because this model ties
  /// them: by such a name, the parameter. Empty where nothing is tied.
  virtual std::map<std::string, std::string> tied_names() const = 0;
  /// Returns the name of the parameter in which tokens are looked up, (V, C).
  virtual std::string embedding() const = 0;
  /// Returns what other programs have before the paths of this model's modules, but for the output
  /// projection "lm_head".
  virtual std::string path_prefix() const { return {}; }
  /// Returns the model's functions on texts with padding; null for a model that has none.
  virtual Encoder* encoder() { return nullptr; }
  /// Names of parameters that files of weights need not have: those of a head that is trained anew.
  /// They have values in a WithoutValues scope too.
  virtual std::set<std::string> head_parameters() const { return {}; }
};

/// A kind of language model.
struct Architecture {
  std::string model_type;          ///< in Hugging Face's config.json
  std::vector<std::string> names;  ///< of sizes that have one
  /// The sizes of one of `names`.
  std::function<std::unique_ptr<LanguageModelConfig>(std::string_view name)> preset;
  /// Makes the sizes that a config.json describes. Throws ConfigError, which names `source`, for a
  /// key that the model does not compute.
  std::function<std::unique_ptr<LanguageModelConfig>(std::string_view json,
                                                     std::string_view source)>
      from_json;
};

}  // namespace zero
