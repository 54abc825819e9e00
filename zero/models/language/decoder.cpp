#include "zero/models/language/decoder.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/key_value_cache.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {

namespace {

// Null where rows are no packed documents.
std::shared_ptr<const Documents> documents_of(const at::Tensor& tokens,
                                              const at::Tensor& positions) {
  if (!positions.defined()) return nullptr;
  return std::make_shared<const Documents>(documents_in(positions, tokens));
}

}  // namespace

at::Tensor Decoder::embed(const at::Tensor& tokens, const at::Tensor& slot, const Places& places) {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) {
    throw ConfigError(fmt::format("{} takes tokens as Long (B, T), not {} ({}).", title(),
                                  c10::toString(tokens.scalar_type()),
                                  fmt::join(tokens.sizes(), ", ")));
  }
  const int64_t end = places.documents ? places.documents->end : places.first + tokens.size(1);
  if (end > context()) {
    throw ConfigError(
        fmt::format("A sequence of {} tokens is longer than the model's context of {} ({}). Use "
                    "shorter sequences or a model with a longer context.",
                    end, context(), context_key()));
  }
  return embed_tokens(tokens, slot, places);
}

at::Tensor Decoder::body(const at::Tensor& tokens, const at::Tensor& positions,
                         const at::Tensor& slot) {
  const auto documents = documents_of(tokens, positions);
  auto x = embed(tokens, slot, {.documents = documents});
  int64_t layer = 0;
  for (auto& block : blocks(tokens, nullptr, documents)) {
    if (recompute_.every > 0 && layer % recompute_.every == 0) {
      x = zero::recompute(std::move(block), std::move(x), recompute_.options);
    } else {
      x = block(x);
    }
    ++layer;
  }
  return x;
}

void Decoder::recompute(RecomputeSettings settings) {
  if (settings.every < 0) {
    throw ConfigError(fmt::format(
        "RecomputeSettings::every is {}; it must be 0 (no recomputation) or a number of blocks.",
        settings.every));
  }
  recompute_ = std::move(settings);
}

void Decoder::check_targets(const at::Tensor& tokens, const at::Tensor& targets) const {
  if (targets.sizes().equals(tokens.sizes())) return;
  throw ConfigError(fmt::format("{}'s targets must have the shape of its tokens, ({}), not ({}).",
                                title(), fmt::join(tokens.sizes(), ", "),
                                fmt::join(targets.sizes(), ", ")));
}

at::Tensor Decoder::loss_of(const at::Tensor& hidden, const at::Tensor& targets,
                            const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy(normed(hidden).view({-1, hidden.size(-1)}), output_weight(),
                              targets.reshape({-1}), options);
}

at::Tensor Decoder::loss(const at::Tensor& tokens, const at::Tensor& targets,
                         const at::Tensor& positions) {
  check_targets(tokens, targets);
  LinearCrossEntropyOptions options;
  if (tied() && at::GradMode::is_enabled() && input_weight().requires_grad()) {
    options.weight_in_backward = announce_rows(input_weight(), tokens);
    options.weight_slot = gradient_slot(input_weight(), options.weight_in_backward);
  }
  return loss_of(body(tokens, positions, options.weight_slot), targets, options);
}

LayerSequence Decoder::layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets,
                              const std::vector<at::Tensor>& positions) {
  if (tokens.empty() || tokens.size() != targets.size() ||
      (!positions.empty() && positions.size() != tokens.size())) {
    throw ConfigError(
        fmt::format("The layers of {} were asked for tokens of {} micro-batches, targets of {} and "
                    "positions of {}; give as many of each, and at least one. Positions may be "
                    "left out.",
                    title(), tokens.size(), targets.size(), positions.size()));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_targets(tokens[i], targets[i]);
    check_targets(tokens[0], targets[i]);
  }
  const auto decoder = self();
  LayerSequence sequence;
  if (tied()) sequence.shared.push_back(input_weight());
  // Micro-batches with other documents have other blocks: the number of a micro-batch goes with its
  // hidden states.
  std::vector<std::vector<Block>> of_batches;
  if (positions.empty()) of_batches.push_back(blocks(tokens.front(), nullptr, nullptr));
  for (size_t i = 0; i < positions.size(); ++i)
    of_batches.push_back(blocks(tokens[i], nullptr, documents_of(tokens[i], positions[i])));
  for (size_t layer = 0; layer < of_batches.front().size(); ++layer) {
    std::vector<Block> of_layer;
    for (auto& each : of_batches) of_layer.push_back(std::move(each[layer]));
    sequence.layers.emplace_back(
        [of_layer = std::move(of_layer)](const std::vector<at::Tensor>& x) {
          if (x.size() == 1) return std::vector<at::Tensor>{of_layer.front()(x[0])};
          const auto number = static_cast<size_t>(x[1].item<int64_t>());
          return std::vector<at::Tensor>{of_layer[number](x[0]), x[1]};
        });
  }
  sequence.inputs = [decoder, tokens = std::move(tokens), positions] {
    const auto all = at::cat(tokens);
    const auto documents = positions.empty() ? nullptr : documents_of(all, at::cat(positions));
    const auto hidden = decoder->embed(all, {}, {.documents = documents});
    std::vector<std::vector<at::Tensor>> inputs;
    for (auto& x : hidden.split(tokens.front().size(0))) {
      const auto number = static_cast<int64_t>(inputs.size());
      inputs.push_back({std::move(x)});
      if (documents) inputs.back().push_back(at::scalar_tensor(number, at::kLong));
    }
    return inputs;
  };
  sequence.loss = [decoder, targets = std::move(targets)](const std::vector<at::Tensor>& hidden,
                                                          int64_t micro_batch) {
    return decoder->loss_of(hidden.front(), targets[static_cast<size_t>(micro_batch)], {});
  };
  return sequence;
}

at::Tensor Decoder::logits(const at::Tensor& tokens, const at::Tensor& positions) {
  return at::matmul(forward(tokens, positions), output_weight().t());
}

at::Tensor Decoder::logits_last(const at::Tensor& tokens) {
  return at::mm(normed(body(tokens, {}).select(1, -1)), output_weight().t());
}

std::vector<at::Tensor> Decoder::logits_next(const std::vector<at::Tensor>& tokens,
                                             const std::vector<KeyValueCache*>& caches) {
  if (tokens.size() != caches.size()) {
    throw ConfigError(fmt::format("{} was given tokens of {} texts and caches of {}.", title(),
                                  tokens.size(), caches.size()));
  }
  std::vector<at::Tensor> all;
  std::vector<std::vector<Block>> of_texts;
  for (size_t i = 0; i < tokens.size(); ++i) {
    all.push_back(embed(tokens[i], {}, {.first = caches[i]->length()}));
    of_texts.push_back(blocks(tokens[i], caches[i], nullptr));
  }
  const size_t layers = of_texts.empty() ? 0 : of_texts.front().size();
  for (size_t layer = 0; layer < layers; ++layer) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = of_texts[i][layer](all[i]);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    caches[i]->advance(tokens[i].size(1));
    all[i] = at::mm(normed(all[i].select(1, -1)), output_weight().t());
  }
  return all;
}

}  // namespace zero
