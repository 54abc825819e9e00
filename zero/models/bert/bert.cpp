#include "zero/models/bert/bert.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/activation.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/layer_norm.h"
#include "zero/models/layers/softmax.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {
namespace {

namespace nn = torch::nn;

Projection projection(const BertConfig& config, int64_t in, int64_t out) {
  return Projection(
      ProjectionOptions{in, out, WeightLayout::out_in, /*bias=*/true, config.initializer_range});
}

nn::LayerNorm make_norm(const BertConfig& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.width}).eps(config.norm_eps));
}

at::Tensor normed(const nn::LayerNorm& norm, const at::Tensor& x) {
  return layer_norm(x, norm->weight, norm->bias, norm->options.eps());
}

// (B, T) -> (B, 1, 1, T): every query of a text sees the same keys.
at::Tensor key_mask(const Texts& texts) {
  return texts.mask.defined() ? texts.mask.unsqueeze(1).unsqueeze(1) : at::Tensor();
}

}  // namespace

BertEmbeddingsImpl::BertEmbeddingsImpl(const BertConfig& config) : config_(config) { reset(); }

void BertEmbeddingsImpl::reset() {
  const auto table = [&](int64_t rows, int64_t padding) {
    return EmbeddingTable(rows, config_.width, config_.initializer_range, padding);
  };
  word_embeddings = register_module("word_embeddings", table(config_.vocab_size, config_.padding));
  position_embeddings = register_module("position_embeddings", table(config_.context, -1));
  token_type_embeddings = register_module("token_type_embeddings", table(config_.types, -1));
  norm = register_module("LayerNorm", make_norm(config_));
}

at::Tensor BertEmbeddingsImpl::forward(const Texts& texts, const at::Tensor& slot) {
  const auto& tokens = texts.tokens;
  auto x = slot.defined() ? tied_embedding(word_embeddings->weight, tokens, slot, config_.padding)
                          : word_embeddings(tokens);
  x = x + token_type_embeddings(texts.types.defined() ? texts.types : at::zeros_like(tokens));
  x = x + position_embeddings->weight.narrow(0, 0, tokens.size(1));
  return drop(normed(norm, x), config_.hidden_dropout, is_training());
}

BertSelfAttentionImpl::BertSelfAttentionImpl(const BertConfig& config) : config_(config) {
  reset();
}

void BertSelfAttentionImpl::reset() {
  query = register_module("query", projection(config_, config_.width, config_.width));
  key = register_module("key", projection(config_, config_.width, config_.width));
  value = register_module("value", projection(config_, config_.width, config_.width));
}

at::Tensor BertSelfAttentionImpl::forward(const at::Tensor& x, const at::Tensor& mask) {
  const auto by_head = [&](const at::Tensor& y) {
    return y.view({x.size(0), x.size(1), config_.heads, -1}).transpose(1, 2);
  };
  const auto y =
      at::scaled_dot_product_attention(by_head(query(x)), by_head(key(x)), by_head(value(x)),
                                       mask.defined() ? std::optional(mask) : std::nullopt,
                                       is_training() ? config_.attention_dropout : 0.0);
  return y.transpose(1, 2).reshape(x.sizes());
}

BertDenseNormImpl::BertDenseNormImpl(const BertConfig& config, int64_t in)
    : config_(config), in_(in) {
  reset();
}

void BertDenseNormImpl::reset() {
  dense = register_module("dense", projection(config_, in_, config_.width));
  norm = register_module("LayerNorm", make_norm(config_));
}

at::Tensor BertDenseNormImpl::end_branch(const at::Tensor& y, const at::Tensor& residual) {
  return add_layer_norm(drop(y, config_.hidden_dropout, is_training()), residual, norm->weight,
                        norm->bias, norm->options.eps())
      .norm;
}

at::Tensor BertDenseNormImpl::transform(const at::Tensor& x) {
  return normed(norm, activated(dense(x), config_.activation));
}

BertAttentionImpl::BertAttentionImpl(const BertConfig& config) : config_(config) { reset(); }

void BertAttentionImpl::reset() {
  self = register_module("self", BertSelfAttention(config_));
  output = register_module("output", BertDenseNorm(config_, config_.width));
}

at::Tensor BertAttentionImpl::forward(const at::Tensor& x, const at::Tensor& mask) {
  return output->end_branch(output->dense(self(x, mask)), x);
}

BertDenseImpl::BertDenseImpl(const BertConfig& config, int64_t out) : config_(config), out_(out) {
  reset();
}

void BertDenseImpl::reset() {
  dense = register_module("dense", projection(config_, config_.width, out_));
}

BertLayerImpl::BertLayerImpl(const BertConfig& config) : config_(config) { reset(); }

void BertLayerImpl::reset() {
  attention = register_module("attention", BertAttention(config_));
  intermediate = register_module("intermediate", BertDense(config_, config_.inner));
  output = register_module("output", BertDenseNorm(config_, config_.inner));
}

at::Tensor BertLayerImpl::forward(const at::Tensor& x, const at::Tensor& mask) {
  const auto middle = attention(x, mask);
  const auto y = feed_forward(intermediate->dense, output->dense, middle, config_.activation);
  return output->end_branch(y, middle);
}

BertEncoderImpl::BertEncoderImpl(const BertConfig& config) : config_(config) { reset(); }

void BertEncoderImpl::reset() {
  layer = register_module("layer", nn::ModuleList());
  for (int64_t i = 0; i < config_.layers; ++i) layer->push_back(BertLayer(config_));
}

BertBodyImpl::BertBodyImpl(const BertConfig& config) : config_(config) { reset(); }

void BertBodyImpl::reset() {
  embeddings = register_module("embeddings", BertEmbeddings(config_));
  encoder = register_module("encoder", BertEncoder(config_));
  if (config_.head != Head::classes) return;
  const WithValues new_head;
  pooler = register_module("pooler", BertDense(config_, config_.width));
}

BertPredictionsImpl::BertPredictionsImpl(const BertConfig& config) : config_(config) { reset(); }

void BertPredictionsImpl::reset() {
  transform = register_module("transform", BertDenseNorm(config_, config_.width));
  bias = register_parameter("bias", at::zeros({config_.vocab_size}));
}

BertMaskedHeadImpl::BertMaskedHeadImpl(const BertConfig& config) : config_(config) { reset(); }

void BertMaskedHeadImpl::reset() {
  predictions = register_module("predictions", BertPredictions(config_));
}

BertImpl::BertImpl(const BertConfig& config) : config_(config) {
  config_.validate();
  reset();
}

void BertImpl::reset() {
  bert = register_module("bert", BertBody(config_));
  const WithValues new_head;
  if (config_.head == Head::classes) {
    classifier = register_module(
        "classifier",
        projection(config_, config_.width, static_cast<int64_t>(config_.labels.size())));
    return;
  }
  cls = register_module("cls", BertMaskedHead(config_));
}

void BertImpl::check(const Texts& texts) const {
  const auto& tokens = texts.tokens;
  const auto refuse = [&](const char* what, const char* dtype, const at::Tensor& tensor) {
    throw ConfigError(fmt::format("BERT takes {} as {} (B, T), not {} ({}).", what, dtype,
                                  c10::toString(tensor.scalar_type()),
                                  fmt::join(tensor.sizes(), ", ")));
  };
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) refuse("tokens", "Long", tokens);
  if (tokens.size(1) > config_.context) {
    throw ConfigError(
        fmt::format("A sequence of {} tokens is longer than the model's context of {} "
                    "(max_position_embeddings). Use shorter sequences or a model with a longer "
                    "context.",
                    tokens.size(1), config_.context));
  }
  const auto& [_, types, mask] = texts;
  if (types.defined() && (types.scalar_type() != at::kLong || types.sizes() != tokens.sizes()))
    refuse("types", "Long", types);
  if (types.defined() && types.is_cpu() && types.numel() > 0 &&
      types.max().item<int64_t>() >= config_.types) {
    throw ConfigError(
        fmt::format("The data have pairs of texts, and the model has {} type of tokens "
                    "(type_vocab_size). Leave out text_pair, or use a model with 2.",
                    config_.types));
  }
  if (mask.defined() && (mask.scalar_type() != at::kBool || mask.sizes() != tokens.sizes()))
    refuse("a mask", "Bool", mask);
}

void BertImpl::check_targets(const Texts& texts, const at::Tensor& targets) const {
  check(texts);
  const auto wanted =
      config_.head == Head::classes ? texts.tokens.sizes().slice(0, 1) : texts.tokens.sizes();
  if (targets.scalar_type() == at::kLong && targets.sizes() == wanted) return;
  throw ConfigError(fmt::format("BERT's targets must be Long of the shape ({}), not {} of ({}).",
                                fmt::join(wanted, ", "), c10::toString(targets.scalar_type()),
                                fmt::join(targets.sizes(), ", ")));
}

at::Tensor BertImpl::body(const Texts& texts, const at::Tensor& slot) {
  auto x = bert->embeddings(texts, slot);
  const auto mask = key_mask(texts);
  int64_t number = 0;
  for (const auto& each : *bert->encoder->layer) {
    const auto layer = [layer = std::static_pointer_cast<BertLayerImpl>(each),
                        mask](const at::Tensor& in) { return layer->forward(in, mask); };
    if (recompute_.every > 0 && number % recompute_.every == 0) {
      x = zero::recompute(layer, std::move(x), recompute_.options);
    } else {
      x = layer(x);
    }
    ++number;
  }
  return x;
}

at::Tensor BertImpl::forward(const Texts& texts) {
  check(texts);
  return body(texts, {});
}

at::Tensor BertImpl::class_logits(const at::Tensor& hidden) {
  const double dropout =
      config_.classifier_dropout < 0 ? config_.hidden_dropout : config_.classifier_dropout;
  const auto pooled = at::tanh(bert->pooler(hidden.select(1, 0)));
  return classifier(drop(pooled, dropout, is_training()));
}

at::Tensor BertImpl::logits(const Texts& texts) {
  const auto hidden = forward(texts);
  if (config_.head == Head::classes) return class_logits(hidden);
  return at::linear(cls->predictions->transform->transform(hidden),
                    bert->embeddings->word_embeddings->weight, cls->predictions->bias);
}

// Only the places that are predicted pass the head: a seventh of them, in training. Where tensors
// have no values (a trace of `zero plan`), all do.
at::Tensor BertImpl::head_loss(const at::Tensor& hidden, const at::Tensor& targets,
                               const at::Tensor& slot) {
  if (config_.head == Head::classes)
    return at::cross_entropy_loss(class_logits(hidden).to(at::kFloat), targets);
  auto x = hidden.reshape({-1, config_.width});
  auto wanted = targets.reshape({-1});
  if (!hidden.is_meta()) {
    const auto places = wanted.ne(kIgnoredTarget).nonzero().squeeze(1);
    x = x.index_select(0, places);
    wanted = wanted.index_select(0, places);
  }
  return linear_cross_entropy(cls->predictions->transform->transform(x),
                              bert->embeddings->word_embeddings->weight, wanted,
                              {.weight_slot = slot, .bias = cls->predictions->bias});
}

at::Tensor BertImpl::loss(const Texts& texts, const at::Tensor& targets) {
  check_targets(texts, targets);
  const auto& weight = bert->embeddings->word_embeddings->weight;
  const bool tied =
      config_.head == Head::masked_token && at::GradMode::is_enabled() && weight.requires_grad();
  const auto slot = tied ? gradient_slot(weight) : at::Tensor();
  return head_loss(body(texts, slot), targets, slot);
}

LayerSequence BertImpl::layers(std::vector<Texts> texts, std::vector<at::Tensor> targets) {
  if (texts.empty() || texts.size() != targets.size()) {
    throw ConfigError(
        fmt::format("The layers of BERT were asked for texts of {} micro-batches and targets of "
                    "{}; give as many of both, and at least one.",
                    texts.size(), targets.size()));
  }
  for (size_t i = 0; i < texts.size(); ++i) check_targets(texts[i], targets[i]);
  const auto self = std::static_pointer_cast<BertImpl>(shared_from_this());
  LayerSequence sequence;
  if (config_.head == Head::masked_token)
    sequence.shared.push_back(bert->embeddings->word_embeddings->weight);
  // The mask of a micro-batch goes with its hidden states.
  for (const auto& each : *bert->encoder->layer) {
    sequence.layers.emplace_back(
        [layer = std::static_pointer_cast<BertLayerImpl>(each)](const std::vector<at::Tensor>& x) {
          return std::vector<at::Tensor>{layer->forward(x[0], x[1]), x[1]};
        });
  }
  sequence.inputs = [self, texts = std::move(texts)] {
    std::vector<std::vector<at::Tensor>> inputs;
    for (const auto& each : texts)
      inputs.push_back({self->bert->embeddings(each, at::Tensor()), key_mask(each)});
    return inputs;
  };
  if (config_.head == Head::classes) {
    sequence.correct = [self, targets](const std::vector<at::Tensor>& hidden, int64_t micro_batch) {
      const auto classes = self->class_logits(hidden[0]).argmax(1);
      return classes.eq(targets[static_cast<size_t>(micro_batch)]).sum().item<int64_t>();
    };
  }
  sequence.loss = [self, targets = std::move(targets)](const std::vector<at::Tensor>& hidden,
                                                       int64_t micro_batch) {
    return self->head_loss(hidden[0], targets[static_cast<size_t>(micro_batch)], {});
  };
  return sequence;
}

void BertImpl::recompute(RecomputeSettings settings) {
  if (settings.every < 0) {
    throw ConfigError(fmt::format(
        "RecomputeSettings::every is {}; it must be 0 (no recomputation) or a number of layers.",
        settings.every));
  }
  recompute_ = std::move(settings);
}

}  // namespace zero
