#include "zero/models/gpt2/gpt2.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/layer_norm.h"
#include "zero/models/layers/linear.h"
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

Gpt2Embedding embedding(int64_t rows, const Gpt2Config& config) {
  return Gpt2Embedding(rows, config.width, config.initializer_range);
}

// A parameter drawn once: the largest of them take a second.
at::Tensor normal(at::IntArrayRef sizes, double deviation) {
  return at::empty(sizes).normal_(0.0, deviation);
}

at::Tensor drop(const at::Tensor& x, double p, bool training) {
  return training && p > 0 ? at::dropout(x, p, true) : x;
}

at::Tensor normed(const nn::LayerNorm& norm, const at::Tensor& x) {
  return zero::layer_norm(x, norm->weight, norm->bias, norm->options.eps());
}

// A branch's output is fresh and no backward needs it, so the sum may take its place: not under
// autocast, where it has fewer bits than the sum. It is a view of rows, too:
// where a view is written, autograd copies the gradient several times in backward, which takes a
// device longer than the memory is worth.
at::Tensor add_branch(const at::Tensor& branch, const at::Tensor& x) {
  const bool in_place = branch.is_cpu() && branch.scalar_type() == x.scalar_type();
  return in_place ? branch.add_(x) : branch + x;
}

}  // namespace

Conv1dImpl::Conv1dImpl(int64_t in, int64_t out, double deviation)
    : in_(in), out_(out), deviation_(deviation) {
  reset();
}

void Conv1dImpl::reset() {
  if (tile_elements_ > 0) {
    tiles = register_module("tiles", TiledLinear(tiling_of(in_, out_, true, tile_elements_)));
    return;
  }
  weight = register_parameter("weight", normal({in_, out_}, deviation_));
  bias = register_parameter("bias", at::zeros({out_}));
}

at::Tensor Conv1dImpl::forward(const at::Tensor& x) {
  return tiles ? tiles(x) : linear(x, weight, bias, WeightLayout::in_out);
}

at::Tensor Conv1dImpl::forward_of_gelu(const at::Tensor& x) {
  return tiles ? tiles(tanh_gelu(x)) : gelu_linear(x, weight, bias, WeightLayout::in_out);
}

bool Conv1dImpl::tile(int64_t max_elements) {
  if (tiles || weight.numel() <= max_elements) return false;
  const auto whole = std::exchange(weight, at::Tensor());
  const auto whole_bias = std::exchange(bias, at::Tensor());
  parameters_.clear();
  tile_elements_ = max_elements;
  reset();
  tiles->to(whole.device(), whole.scalar_type());
  tiles->load(whole.t(), whole_bias);
  for (auto& part : tiles->weights) part.set_requires_grad(whole.requires_grad());
  for (auto& part : tiles->biases) part.set_requires_grad(whole_bias.requires_grad());
  tiles->train(is_training());
  return true;
}

Gpt2EmbeddingImpl::Gpt2EmbeddingImpl(int64_t rows, int64_t width, double deviation)
    : rows_(rows), width_(width), deviation_(deviation) {
  reset();
}

void Gpt2EmbeddingImpl::reset() {
  weight = register_parameter("weight", normal({rows_, width_}, deviation_));
}

at::Tensor Gpt2EmbeddingImpl::forward(const at::Tensor& indices) {
  return at::embedding(weight, indices);
}

Gpt2AttentionImpl::Gpt2AttentionImpl(const Gpt2Config& config) : config_(config) { reset(); }

void Gpt2AttentionImpl::reset() {
  c_attn = register_module("c_attn",
                           Conv1d(config_.width, 3 * config_.width, config_.initializer_range));
  c_proj =
      register_module("c_proj", Conv1d(config_.width, config_.width, residual_deviation(config_)));
}

at::Tensor Gpt2AttentionImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  // unbind, not three selects: its backward writes the three gradients side by side once instead of
  // adding three zero-padded ones. The kernel reads and writes (B, T, heads, C / heads) through
  // strides, so nothing is permuted in memory.
  const auto parts =
      c_attn(x).view({batch, sequence, 3, config_.heads, config_.width / config_.heads}).unbind(2);
  auto y = at::scaled_dot_product_attention(
      parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {},
      is_training() ? config_.attention_dropout : 0.0, /*is_causal=*/true);
  y = c_proj(y.transpose(1, 2).reshape({batch, sequence, config_.width}));
  return drop(y, config_.residual_dropout, is_training());
}

Gpt2MlpImpl::Gpt2MlpImpl(const Gpt2Config& config) : config_(config) { reset(); }

void Gpt2MlpImpl::reset() {
  c_fc = register_module("c_fc",
                         Conv1d(config_.width, inner_width(config_), config_.initializer_range));
  c_proj = register_module(
      "c_proj", Conv1d(inner_width(config_), config_.width, residual_deviation(config_)));
}

at::Tensor Gpt2MlpImpl::forward(const at::Tensor& x) {
  const auto y = c_proj->forward_of_gelu(c_fc(x));
  return drop(y, config_.residual_dropout, is_training());
}

Gpt2BlockImpl::Gpt2BlockImpl(const Gpt2Config& config) : config_(config) { reset(); }

void Gpt2BlockImpl::reset() {
  ln_1 = register_module("ln_1", make_norm(config_));
  attn = register_module("attn", Gpt2Attention(config_));
  ln_2 = register_module("ln_2", make_norm(config_));
  mlp = register_module("mlp", Gpt2Mlp(config_));
}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x) {
  const auto middle = add_branch(attn(normed(ln_1, x)), x);
  return add_branch(mlp(normed(ln_2, middle)), middle);
}

Gpt2Impl::Gpt2Impl(const Gpt2Config& config) : config_(config) {
  config_.validate();
  reset();
}

void Gpt2Impl::reset() {
  wte = register_module("wte", embedding(config_.vocab_size, config_));
  wpe = register_module("wpe", embedding(config_.context, config_));
  h = register_module("h", nn::ModuleList());
  for (int64_t layer = 0; layer < config_.layers; ++layer) h->push_back(Gpt2Block(config_));
  ln_f = register_module("ln_f", make_norm(config_));
  if (!config_.tie_word_embeddings) {
    lm_head_ = register_module("lm_head", embedding(config_.vocab_size, config_));
  }
}

const at::Tensor& Gpt2Impl::output_weight() const {
  return config_.tie_word_embeddings ? wte->weight : lm_head_->weight;
}

at::Tensor Gpt2Impl::embed(const at::Tensor& tokens, const at::Tensor& slot) {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong) {
    throw ConfigError(fmt::format("GPT-2 takes tokens as Long (B, T), not {} ({}).",
                                  c10::toString(tokens.scalar_type()),
                                  fmt::join(tokens.sizes(), ", ")));
  }
  const int64_t sequence = tokens.size(1);
  if (sequence > config_.context) {
    throw ConfigError(
        fmt::format("A sequence of {} tokens is longer than the model's context of {} "
                    "(n_positions). Use shorter sequences or a model "
                    "with a longer context.",
                    sequence, config_.context));
  }
  auto x = slot.defined() ? tied_embedding(wte->weight, tokens, slot) : wte(tokens);
  x = x.add_(wpe->weight.narrow(0, 0, sequence));
  return drop(x, config_.embedding_dropout, is_training());
}

at::Tensor Gpt2Impl::body(const at::Tensor& tokens, const at::Tensor& slot) {
  auto x = embed(tokens, slot);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const auto block = h->ptr<Gpt2BlockImpl>(static_cast<size_t>(layer));
    if (recompute_.every > 0 && layer % recompute_.every == 0) {
      x = zero::recompute([block](const at::Tensor& y) { return block->forward(y); }, std::move(x),
                          recompute_.options);
    } else {
      x = block->forward(x);
    }
  }
  return x;
}

void Gpt2Impl::recompute(RecomputeSettings settings) {
  if (settings.every < 0) {
    throw ConfigError(fmt::format(
        "RecomputeSettings::every is {}; it must be 0 (no recomputation) or a number of blocks.",
        settings.every));
  }
  recompute_ = std::move(settings);
}

at::Tensor Gpt2Impl::forward(const at::Tensor& tokens) { return normed(ln_f, body(tokens)); }

void Gpt2Impl::check_targets(const at::Tensor& tokens, const at::Tensor& targets) {
  if (targets.sizes().equals(tokens.sizes())) return;
  throw ConfigError(
      fmt::format("GPT-2's targets must have the shape of its tokens, ({}), not ({}).",
                  fmt::join(tokens.sizes(), ", "), fmt::join(targets.sizes(), ", ")));
}

at::Tensor Gpt2Impl::loss_of(const at::Tensor& hidden, const at::Tensor& targets,
                             const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy(normed(ln_f, hidden).view({-1, config_.width}), output_weight(),
                              targets.reshape({-1}), options);
}

at::Tensor Gpt2Impl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  check_targets(tokens, targets);
  LinearCrossEntropyOptions options;
  if (config_.tie_word_embeddings && at::GradMode::is_enabled() && wte->weight.requires_grad())
    options.weight_slot = gradient_slot(wte->weight);
  return loss_of(body(tokens, options.weight_slot), targets, options);
}

LayerSequence Gpt2Impl::layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets) {
  if (tokens.empty() || tokens.size() != targets.size()) {
    throw ConfigError(
        fmt::format("Gpt2::layers was given tokens of {} micro-batches and targets of {}; it takes "
                    "as many of both, and at least one.",
                    tokens.size(), targets.size()));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_targets(tokens[i], targets[i]);
    check_targets(tokens[0], targets[i]);
  }
  const auto self = std::static_pointer_cast<Gpt2Impl>(shared_from_this());
  LayerSequence sequence;
  if (config_.tie_word_embeddings) sequence.shared.push_back(wte->weight);
  sequence.inputs = [self, tokens = std::move(tokens)] {
    const auto all = self->embed(at::cat(tokens));
    std::vector<std::vector<at::Tensor>> inputs;
    for (auto& x : all.split(tokens.front().size(0))) inputs.push_back({std::move(x)});
    return inputs;
  };
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    sequence.layers.emplace_back([block = h->ptr<Gpt2BlockImpl>(static_cast<size_t>(layer))](
                                     const std::vector<at::Tensor>& x) {
      return std::vector<at::Tensor>{block->forward(x.front())};
    });
  }
  sequence.loss = [self, targets = std::move(targets)](const std::vector<at::Tensor>& hidden,
                                                       int64_t micro_batch) {
    return self->loss_of(hidden.front(), targets[static_cast<size_t>(micro_batch)], {});
  };
  return sequence;
}

at::Tensor Gpt2Impl::logits(const at::Tensor& tokens) {
  return at::matmul(forward(tokens), output_weight().t());
}

at::Tensor Gpt2Impl::logits_last(const at::Tensor& tokens) {
  return at::mm(normed(ln_f, body(tokens).select(1, -1)), output_weight().t());
}

}  // namespace zero
