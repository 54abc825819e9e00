#include "zero/models/gpt2/gpt2_language_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "zero/models/gpt2/gpt2.h"
#include "zero/models/language/module_language_model.h"
#include "zero/models/layers/cross_entropy.h"

namespace zero {
namespace {

class Gpt2LanguageModelConfig final : public LanguageModelConfig {
 public:
  explicit Gpt2LanguageModelConfig(Gpt2Config sizes, bool published)
      : sizes_(sizes), published_(published) {}

  int64_t vocab_size() const override { return sizes_.vocab_size; }
  void set_vocab_size(int64_t tokens) override { sizes_.vocab_size = tokens; }
  bool takes_vocabulary_of_data() const override { return !published_; }
  int64_t context() const override { return sizes_.context; }
  int64_t layers() const override { return sizes_.layers; }
  int64_t parameter_count() const override { return sizes_.parameter_count(); }
  int64_t largest_parameter() const override { return sizes_.vocab_size * sizes_.width; }
  std::vector<std::array<int64_t, 2>> matrices() const override { return sizes_.matrices(); }
  ActivationBytes activation_bytes(int64_t tokens, int64_t element_bytes) const override {
    // The operators of a block keep 13 inputs of the model's width; the loss a chunk of logits with
    // its gradient.
    const int64_t hidden = tokens * sizes_.width * element_bytes;
    const int64_t logits = std::min(kLogitsBytes, 4 * tokens * sizes_.vocab_size);
    return {.layer = 13 * hidden, .layer_input = hidden, .loss = 2 * logits};
  }
  void set_dropout(double probability) override { sizes_.set_dropout(probability); }
  void validate() const override { sizes_.validate(); }
  std::string to_json() const override { return sizes_.to_json(); }
  std::string description() const override {
    return fmt::format("{} layers, {} wide", sizes_.layers, sizes_.width);
  }
  std::unique_ptr<LanguageModel> build() const override;

 private:
  Gpt2Config sizes_;
  bool published_;
};

std::unique_ptr<LanguageModel> Gpt2LanguageModelConfig::build() const {
  return std::make_unique<ModuleLanguageModel<Gpt2, Gpt2LanguageModelConfig>>(
      sizes_, ModuleNames{.embedding = "wte.weight", .path_prefix = "transformer."}, published_);
}

}  // namespace

Architecture gpt2_architecture() {
  return {.model_type = "gpt2",
          .names = Gpt2Config::preset_names(),
          .preset =
              [](std::string_view name) {
                return std::make_unique<Gpt2LanguageModelConfig>(Gpt2Config::preset(name),
                                                                 name != "gpt2-nano");
              },
          .from_json =
              [](std::string_view json, std::string_view source) {
                return std::make_unique<Gpt2LanguageModelConfig>(
                    Gpt2Config::from_json(json, source), true);
              }};
}

}  // namespace zero
