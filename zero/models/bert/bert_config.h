// The sizes of a BERT model, and its head.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/class_names.h"
#include "zero/models/language/encoder.h"

namespace zero {

struct BertConfig {
  Head head = Head::masked_token;  ///< masked_token or classes
  int64_t vocab_size = 30522;
  int64_t context = 512;  ///< max_position_embeddings
  int64_t width = 768;    ///< C
  int64_t inner = 3072;   ///< width of the feed-forward layer
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t types = 2;  ///< type_vocab_size
  std::string activation = "gelu";
  double norm_eps = 1e-12;
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  double classifier_dropout = -1;  ///< negative: as hidden_dropout
  double initializer_range = 0.02;
  int64_t padding = 0;  ///< the token whose embedding is not trained by look-ups; -1: none
  std::vector<std::string> labels = class_names(2);  ///< of the classes, by number

  /// Throws ConfigError unless the sizes are positive and fit each other.
  void validate() const;
  /// The number of parameters of a model of these sizes; tied embeddings count once.
  int64_t parameter_count() const;
  /// Rows and columns of each parameter of two dimensions.
  std::vector<std::array<int64_t, 2>> matrices() const;

  /// Hugging Face's config.json: reading it back gives an equal config.
  std::string to_json() const;
  /// The config that a Hugging Face config.json describes. Keys that are absent take the defaults
  /// of transformers' class; `architectures` says which head, and without it the head is that of
  /// masked tokens. ConfigError, which names `source` and the key, for malformed JSON, another
  /// model type, a key that the model does not compute, or sizes that do not validate.
  static BertConfig from_json(std::string_view json, std::string_view source);

  bool operator==(const BertConfig&) const = default;
};

}  // namespace zero
