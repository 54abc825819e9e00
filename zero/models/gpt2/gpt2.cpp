#include "zero/models/gpt2/gpt2.h"

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <string>

#include "zero/models/layers/activation.h"
#include "zero/models/layers/key_value_cache.h"
#include "zero/models/layers/layer_norm.h"
#include "zero/models/layers/residual.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {
namespace {

namespace nn = torch::nn;

nn::LayerNorm make_norm(const Gpt2Config& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.width}).eps(config.layer_norm_eps));
}

// The projections that end a residual branch start smaller, by the square root of the number of
// branches.
double residual_deviation(const Gpt2Config& config) {
  return config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.layers));
}

int64_t inner_width(const Gpt2Config& config) {
  return config.inner > 0 ? config.inner : 4 * config.width;
}

EmbeddingTable embedding(int64_t rows, const Gpt2Config& config) {
  return EmbeddingTable(rows, config.width, config.initializer_range);
}

Projection conv(int64_t in, int64_t out, double deviation) {
  return Projection(ProjectionOptions{in, out, WeightLayout::in_out, /*bias=*/true, deviation});
}

at::Tensor layer_normed(const nn::LayerNorm& norm, const at::Tensor& x) {
  return zero::layer_norm(x, norm->weight, norm->bias, norm->options.eps());
}

}  // namespace

Gpt2AttentionImpl::Gpt2AttentionImpl(const Gpt2Config& config, int64_t layer)
    : config_(config), layer_(static_cast<size_t>(layer)) {
  if (!config_.scale_scores || config_.scale_scores_by_layer) {
    const int64_t columns = config_.width / config_.heads;
    const auto head = static_cast<double>(columns);
    scale_ = (config_.scale_scores ? 1 / std::sqrt(head) : 1.0) /
             static_cast<double>(config_.scale_scores_by_layer ? layer + 1 : 1);
  }
  reset();
}

void Gpt2AttentionImpl::reset() {
  c_attn =
      register_module("c_attn", conv(config_.width, 3 * config_.width, config_.initializer_range));
  c_proj =
      register_module("c_proj", conv(config_.width, config_.width, residual_deviation(config_)));
}

at::Tensor Gpt2AttentionImpl::forward(const at::Tensor& x, KeyValueCache* cache,
                                      const AttentionMask& mask) {
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  // It uses unbind, and not three selects: the backward of unbind writes the three gradients side
  // by side once instead of adding three zero-padded ones.
  auto parts =
      c_attn(x).view({batch, sequence, 3, config_.heads, config_.width / config_.heads}).unbind(2);
  if (cache != nullptr) {
    const auto& all = cache->append(layer_, parts[1], parts[2]);
    parts[1] = all.keys;
    parts[2] = all.values;
  }
  const auto y = c_proj(causal_attention(parts[0], parts[1], parts[2], mask,
                                         is_training() ? config_.attention_dropout : 0.0, scale_));
  return drop(y, config_.residual_dropout, is_training());
}

Gpt2MlpImpl::Gpt2MlpImpl(const Gpt2Config& config) : config_(config) { reset(); }

void Gpt2MlpImpl::reset() {
  c_fc =
      register_module("c_fc", conv(config_.width, inner_width(config_), config_.initializer_range));
  c_proj = register_module("c_proj",
                           conv(inner_width(config_), config_.width, residual_deviation(config_)));
}

at::Tensor Gpt2MlpImpl::forward(const at::Tensor& x) {
  return drop(feed_forward(c_fc, c_proj, x, config_.activation), config_.residual_dropout,
              is_training());
}

Gpt2BlockImpl::Gpt2BlockImpl(const Gpt2Config& config, int64_t layer)
    : config_(config), layer_(layer) {
  reset();
}

void Gpt2BlockImpl::reset() {
  ln_1 = register_module("ln_1", make_norm(config_));
  attn = register_module("attn", Gpt2Attention(config_, layer_));
  ln_2 = register_module("ln_2", make_norm(config_));
  mlp = register_module("mlp", Gpt2Mlp(config_));
}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x, KeyValueCache* cache,
                                  const AttentionMask& mask) {
  const auto [middle, normed] = add_layer_norm(attn(layer_normed(ln_1, x), cache, mask), x,
                                               ln_2->weight, ln_2->bias, ln_2->options.eps());
  return add_branch(mlp(normed), middle);
}

Gpt2Impl::Gpt2Impl(const Gpt2Config& config) : config_(config) {
  config_.validate();
  reset();
}

void Gpt2Impl::reset() {
  wte = register_module("wte", embedding(config_.vocab_size, config_));
  wpe = register_module("wpe", embedding(config_.context, config_));
  h = register_module("h", nn::ModuleList());
  for (int64_t layer = 0; layer < config_.layers; ++layer) h->push_back(Gpt2Block(config_, layer));
  ln_f = register_module("ln_f", make_norm(config_));
  if (!config_.tie_word_embeddings) {
    lm_head_ = register_module("lm_head", embedding(config_.vocab_size, config_));
  }
}

const at::Tensor& Gpt2Impl::output_weight() const {
  return config_.tie_word_embeddings ? wte->weight : lm_head_->weight;
}

at::Tensor Gpt2Impl::embed_tokens(const at::Tensor& tokens, const at::Tensor& slot,
                                  const Places& places) {
  auto x = slot.defined() ? tied_embedding(wte->weight, tokens, slot) : wte(tokens);
  x = x.add_(places.documents ? wpe(places.documents->positions)
                              : wpe->weight.narrow(0, places.first, tokens.size(1)));
  return drop(x, config_.embedding_dropout, is_training());
}

std::vector<Decoder::Block> Gpt2Impl::blocks(const at::Tensor& tokens, KeyValueCache* cache,
                                             const std::shared_ptr<const Documents>& documents) {
  std::vector<Block> all;
  AttentionMask mask{.documents = documents};
  if (cache != nullptr)
    mask.seen = cached_mask(cache->length(), tokens.size(1), 0, tokens.device());
  for (const auto& each : *h) {
    all.emplace_back([block = std::static_pointer_cast<Gpt2BlockImpl>(each), cache,
                      mask](const at::Tensor& x) { return block->forward(x, cache, mask); });
  }
  return all;
}

at::Tensor Gpt2Impl::normed(const at::Tensor& hidden) { return layer_normed(ln_f, hidden); }

std::shared_ptr<Decoder> Gpt2Impl::self() {
  return std::static_pointer_cast<Gpt2Impl>(shared_from_this());
}

}  // namespace zero
