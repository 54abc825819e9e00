#include "zero/models/llama/llama_language_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/models/layers/cross_entropy.h"
#include "zero/models/llama/llama.h"

namespace zero {
namespace {

class LlamaLanguageModelConfig final : public LanguageModelConfig {
 public:
  explicit LlamaLanguageModelConfig(LlamaConfig sizes) : sizes_(std::move(sizes)) {}

  int64_t vocab_size() const override { return sizes_.vocab_size; }
  void set_vocab_size(int64_t tokens) override { sizes_.vocab_size = tokens; }
  bool takes_vocabulary_of_data() const override { return false; }
  int64_t context() const override { return sizes_.longest(); }
  int64_t layers() const override { return sizes_.layers; }
  int64_t parameter_count() const override { return sizes_.parameter_count(); }
  int64_t largest_parameter() const override {
    return std::max(sizes_.vocab_size, sizes_.inner) * sizes_.width;
  }
  std::vector<std::array<int64_t, 2>> matrices() const override { return sizes_.matrices(); }
  ActivationBytes activation_bytes(int64_t tokens, int64_t element_bytes) const override {
    // The operators of a block keep 4 inputs of the model's width; queries and what attention makes
    // of them, keys and values; gate, up and their product. The loss keeps a chunk of logits with
    // its gradient.
    const int64_t hidden = tokens * sizes_.width * element_bytes;
    const int64_t heads = 2 * (sizes_.heads + sizes_.key_heads) * sizes_.head_dim;
    const int64_t logits = std::min(kLogitsBytes, 4 * tokens * sizes_.vocab_size);
    return {.layer = 4 * hidden + tokens * element_bytes * (heads + 3 * sizes_.inner),
            .layer_input = hidden,
            .loss = 2 * logits};
  }
  void set_dropout(double probability) override { sizes_.attention_dropout = probability; }
  void validate() const override { sizes_.validate(); }
  std::string to_json() const override { return sizes_.to_json(); }
  std::string description() const override {
    return fmt::format("{}, {} layers, {} wide", model_type(sizes_.family), sizes_.layers,
                       sizes_.width);
  }
  std::unique_ptr<LanguageModel> build() const override;

 private:
  LlamaConfig sizes_;
};

class LlamaLanguageModel final : public LanguageModel {
 public:
  explicit LlamaLanguageModel(const LlamaConfig& sizes) : config_(sizes), model_(sizes) {}

  torch::nn::Module& module() override { return *model_; }
  const LanguageModelConfig& config() const override { return config_; }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) override {
    return model_->loss(tokens, targets);
  }
  LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets) override {
    return model_->layers(std::move(tokens), std::move(targets));
  }
  at::Tensor logits_last(const at::Tensor& tokens) override { return model_->logits_last(tokens); }
  at::Tensor logits_next(const at::Tensor& tokens, KeyValueCache& cache) override {
    return model_->logits_next(tokens, cache);
  }
  void recompute(RecomputeSettings settings) override { model_->recompute(std::move(settings)); }
  std::map<std::string, TensorPlace> export_places() override { return tile_places(*model_); }
  std::map<std::string, std::string> tied_names() const override {
    if (!model_->config().tie_word_embeddings) return {};
    return {{"lm_head.weight", "model.embed_tokens.weight"}};
  }

 private:
  LlamaLanguageModelConfig config_;
  Llama model_;
};

std::unique_ptr<LanguageModel> LlamaLanguageModelConfig::build() const {
  return std::make_unique<LlamaLanguageModel>(sizes_);
}

}  // namespace

Architecture llama_architecture(LlamaFamily family) {
  return {.model_type = std::string(model_type(family)),
          .names = {},
          .preset = {},
          .from_json = [](std::string_view json, std::string_view source) {
            return std::make_unique<LlamaLanguageModelConfig>(LlamaConfig::from_json(json, source));
          }};
}

}  // namespace zero
