#include "zero/models/language/decoder.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/key_value_cache.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {

at::Tensor Decoder::embed(const at::Tensor& tokens, const at::Tensor& slot, int64_t first) {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) {
    throw ConfigError(fmt::format("{} takes tokens as Long (B, T), not {} ({}).", title(),
                                  c10::toString(tokens.scalar_type()),
                                  fmt::join(tokens.sizes(), ", ")));
  }
  if (first + tokens.size(1) > context()) {
    throw ConfigError(
        fmt::format("A sequence of {} tokens is longer than the model's context of {} ({}). Use "
                    "shorter sequences or a model with a longer context.",
                    first + tokens.size(1), context(), context_key()));
  }
  return embed_tokens(tokens, slot, first);
}

at::Tensor Decoder::body(const at::Tensor& tokens, const at::Tensor& slot) {
  auto x = embed(tokens, slot);
  int64_t layer = 0;
  for (auto& block : blocks(tokens, nullptr)) {
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

at::Tensor Decoder::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  check_targets(tokens, targets);
  LinearCrossEntropyOptions options;
  if (tied() && at::GradMode::is_enabled() && input_weight().requires_grad())
    options.weight_slot = gradient_slot(input_weight());
  return loss_of(body(tokens, options.weight_slot), targets, options);
}

LayerSequence Decoder::layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets) {
  if (tokens.empty() || tokens.size() != targets.size()) {
    throw ConfigError(
        fmt::format("The layers of {} were asked for tokens of {} micro-batches and targets of {}; "
                    "give as many of both, and at least one.",
                    title(), tokens.size(), targets.size()));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_targets(tokens[i], targets[i]);
    check_targets(tokens[0], targets[i]);
  }
  const auto decoder = self();
  LayerSequence sequence;
  if (tied()) sequence.shared.push_back(input_weight());
  for (auto& block : blocks(tokens.front(), nullptr)) {
    sequence.layers.emplace_back([block = std::move(block)](const std::vector<at::Tensor>& x) {
      return std::vector<at::Tensor>{block(x.front())};
    });
  }
  sequence.inputs = [decoder, tokens = std::move(tokens)] {
    const auto all = decoder->embed(at::cat(tokens));
    std::vector<std::vector<at::Tensor>> inputs;
    for (auto& x : all.split(tokens.front().size(0))) inputs.push_back({std::move(x)});
    return inputs;
  };
  sequence.loss = [decoder, targets = std::move(targets)](const std::vector<at::Tensor>& hidden,
                                                          int64_t micro_batch) {
    return decoder->loss_of(hidden.front(), targets[static_cast<size_t>(micro_batch)], {});
  };
  return sequence;
}

at::Tensor Decoder::logits(const at::Tensor& tokens) {
  return at::matmul(forward(tokens), output_weight().t());
}

at::Tensor Decoder::logits_last(const at::Tensor& tokens) {
  return at::mm(normed(body(tokens).select(1, -1)), output_weight().t());
}

at::Tensor Decoder::logits_next(const at::Tensor& tokens, KeyValueCache& cache) {
  auto x = embed(tokens, {}, cache.length());
  for (const auto& block : blocks(tokens, &cache)) x = block(x);
  cache.advance(tokens.size(1));
  return at::mm(normed(x.select(1, -1)), output_weight().t());
}

}  // namespace zero
