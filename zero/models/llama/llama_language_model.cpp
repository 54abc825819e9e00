#include "zero/models/llama/llama_language_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/models/language/module_language_model.h"
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

std::unique_ptr<LanguageModel> LlamaLanguageModelConfig::build() const {
  return std::make_unique<ModuleLanguageModel<Llama, LlamaLanguageModelConfig>>(
      sizes_, ModuleNames{.embedding = "model.embed_tokens.weight"});
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
