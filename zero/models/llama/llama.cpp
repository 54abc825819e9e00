#include "zero/models/llama/llama.h"

#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <map>

#include "zero/models/layers/key_value_cache.h"
#include "zero/models/layers/residual.h"
#include "zero/models/layers/swiglu.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {
namespace {

Projection projection(const LlamaConfig& config, int64_t in, int64_t out, bool bias) {
  return Projection(
      ProjectionOptions{in, out, WeightLayout::out_in, bias, config.initializer_range});
}

RmsNorm make_norm(const LlamaConfig& config, int64_t width) {
  return RmsNorm(width, config.norm_eps,
                 config.gemma ? NormScale::weight_and_one : NormScale::weight);
}

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config) : config_(config) { reset(); }

void LlamaAttentionImpl::reset() {
  const auto& c = config_;
  const int64_t queries = c.heads * c.head_dim;
  const int64_t keys = c.key_heads * c.head_dim;
  q_proj = register_module("q_proj", projection(c, c.width, queries, c.qkv_bias));
  k_proj = register_module("k_proj", projection(c, c.width, keys, c.qkv_bias));
  v_proj = register_module("v_proj", projection(c, c.width, keys, c.qkv_bias));
  o_proj = register_module("o_proj", projection(c, queries, c.width, c.output_bias));
  if (!c.head_norms) return;
  q_norm = register_module("q_norm", make_norm(c, c.head_dim));
  k_norm = register_module("k_norm", make_norm(c, c.head_dim));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const RotaryTable& table,
                                       const AttentionMask& mask, KeyValueCache* cache,
                                       size_t layer) {
  const auto by_head = [&](const at::Tensor& y, int64_t heads) {
    return y.view({x.size(0), x.size(1), heads, config_.head_dim});
  };
  auto queries = by_head(q_proj(x), config_.heads);
  auto keys = by_head(k_proj(x), config_.key_heads);
  auto values = by_head(v_proj(x), config_.key_heads);
  if (config_.head_norms) {
    queries = q_norm(queries);
    keys = k_norm(keys);
  }
  queries = rotate(queries, table, x.scalar_type());
  keys = rotate(keys, table, x.scalar_type());
  if (cache != nullptr) {
    const auto& all = cache->append(layer, keys, values);
    keys = all.keys;
    values = all.values;
  }
  const auto scalar = static_cast<double>(config_.query_scalar);
  const auto scale = scalar > 0 ? std::optional(1 / std::sqrt(scalar)) : std::nullopt;
  return o_proj(causal_attention(queries, keys, values, mask,
                                 is_training() ? config_.attention_dropout : 0.0, scale));
}

LlamaMlpImpl::LlamaMlpImpl(const LlamaConfig& config) : config_(config) { reset(); }

void LlamaMlpImpl::reset() {
  const auto& c = config_;
  gate_proj = register_module("gate_proj", projection(c, c.width, c.inner, c.inner_bias));
  up_proj = register_module("up_proj", projection(c, c.width, c.inner, c.inner_bias));
  down_proj = register_module("down_proj", projection(c, c.inner, c.width, c.inner_bias));
}

at::Tensor LlamaMlpImpl::forward(const at::Tensor& x) {
  return down_proj(config_.gemma ? geglu(gate_proj(x), up_proj(x))
                                 : swiglu(gate_proj(x), up_proj(x)));
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) : config_(config) { reset(); }

void LlamaBlockImpl::reset() {
  const auto make = [&](const char* name) {
    return register_module(name, make_norm(config_, config_.width));
  };
  self_attn = register_module("self_attn", LlamaAttention(config_));
  mlp = register_module("mlp", LlamaMlp(config_));
  input_layernorm = make("input_layernorm");
  post_attention_layernorm = make("post_attention_layernorm");
  if (!config_.branch_norms) return;
  pre_feedforward_layernorm = make("pre_feedforward_layernorm");
  post_feedforward_layernorm = make("post_feedforward_layernorm");
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const RotaryTable& table,
                                   const AttentionMask& mask, KeyValueCache* cache, size_t layer) {
  const auto seen = self_attn(input_layernorm(x), table, mask, cache, layer);
  if (!config_.branch_norms) {
    const auto [middle, normed] = post_attention_layernorm->add(seen, x);
    return add_branch(mlp(normed), middle);
  }
  const auto [middle, normed] = pre_feedforward_layernorm->add(post_attention_layernorm(seen), x);
  return add_branch(post_feedforward_layernorm(mlp(normed)), middle);
}

LlamaBodyImpl::LlamaBodyImpl(const LlamaConfig& config) : config_(config) { reset(); }

void LlamaBodyImpl::reset() {
  const auto& c = config_;
  embed_tokens = register_module(
      "embed_tokens", EmbeddingTable(c.vocab_size, c.width, c.initializer_range, c.padding));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < c.layers; ++layer) layers->push_back(LlamaBlock(c));
  norm = register_module("norm", make_norm(c, c.width));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_(config) {
  config_.validate();
  config_.windows.resize(static_cast<size_t>(config_.layers), 0);
  reset();
}

void LlamaImpl::reset() {
  model = register_module("model", LlamaBody(config_));
  if (config_.tie_word_embeddings) return;
  lm_head = register_module(
      "lm_head", EmbeddingTable(config_.vocab_size, config_.width, config_.initializer_range));
}

const at::Tensor& LlamaImpl::output_weight() const {
  return config_.tie_word_embeddings ? model->embed_tokens->weight : lm_head->weight;
}

at::Tensor LlamaImpl::embed_tokens(const at::Tensor& tokens, const at::Tensor& slot,
                                   const Places& /*places*/) {
  auto x = slot.defined() ? tied_embedding(input_weight(), tokens, slot, config_.padding)
                          : model->embed_tokens(tokens);
  if (!config_.gemma) return x;
  // The root is rounded to their dtype.
  return x * at::scalar_tensor(std::sqrt(static_cast<double>(config_.width)), x.options());
}

std::vector<Decoder::Block> LlamaImpl::blocks(const at::Tensor& tokens, KeyValueCache* cache,
                                              const std::shared_ptr<const Documents>& documents) {
  const int64_t sequence = documents ? documents->longest : tokens.size(1);
  const int64_t past = cache == nullptr ? 0 : cache->length();
  const auto device = tokens.device();
  const auto table_of = [&](const RotaryOptions& rotary) {
    auto table = rotary_table(rotary, config_.head_dim, config_.context,
                              documents ? documents->end : past + sequence, device);
    if (documents) return rows_at(table, documents->positions);
    if (past > 0) {
      table.cosines = table.cosines.narrow(0, past, sequence);
      table.sines = table.sines.narrow(0, past, sequence);
    }
    return table;
  };
  const auto table = table_of(config_.rotary);
  const auto of_windows = config_.window_rotary ? table_of(*config_.window_rotary) : table;
  std::map<int64_t, at::Tensor> masks;  // by window
  std::vector<Block> all;
  for (size_t layer = 0; layer < config_.windows.size(); ++layer) {
    const int64_t window = config_.windows[layer];
    auto& seen = masks[window];
    if (!seen.defined()) seen = cached_mask(past, sequence, window, device);
    all.emplace_back(
        [block = model->layers->ptr<LlamaBlockImpl>(layer), table = window > 0 ? of_windows : table,
         mask = AttentionMask{.seen = seen, .documents = documents}, cache,
         layer](const at::Tensor& x) { return block->forward(x, table, mask, cache, layer); });
  }
  return all;
}

std::shared_ptr<Decoder> LlamaImpl::self() {
  return std::static_pointer_cast<LlamaImpl>(shared_from_this());
}

}  // namespace zero
