#include "zero/models/bert/bert_language_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/bert/bert.h"
#include "zero/models/layers/cross_entropy.h"

namespace zero {
namespace {

class BertLanguageModelConfig final : public LanguageModelConfig {
 public:
  explicit BertLanguageModelConfig(BertConfig sizes) : sizes_(std::move(sizes)) {}

  int64_t vocab_size() const override { return sizes_.vocab_size; }
  void set_vocab_size(int64_t tokens) override { sizes_.vocab_size = tokens; }
  bool takes_vocabulary_of_data() const override { return false; }
  int64_t context() const override { return sizes_.context; }
  int64_t layers() const override { return sizes_.layers; }
  int64_t parameter_count() const override { return sizes_.parameter_count(); }
  int64_t largest_parameter() const override {
    return std::max(sizes_.vocab_size, sizes_.inner) * sizes_.width;
  }
  std::vector<std::array<int64_t, 2>> matrices() const override { return sizes_.matrices(); }
  ActivationBytes activation_bytes(int64_t tokens, int64_t element_bytes) const override {
    // The operators of a block keep 8 inputs of the model's width, and the inner ones before and
    // behind the activation. The loss keeps a chunk of logits with its gradient.
    const int64_t hidden = tokens * sizes_.width * element_bytes;
    const int64_t outputs = sizes_.head == Head::classes
                                ? static_cast<int64_t>(sizes_.labels.size())
                                : sizes_.vocab_size;
    return {.layer = 8 * hidden + 2 * tokens * sizes_.inner * element_bytes,
            .layer_input = hidden,
            .loss = 2 * std::min(kLogitsBytes, 4 * tokens * outputs)};
  }
  Head head() const override { return sizes_.head; }
  std::vector<std::string> labels() const override {
    return sizes_.head == Head::classes ? sizes_.labels : std::vector<std::string>();
  }
  void set_head(Head head, std::vector<std::string> labels) override {
    if (head == Head::next_token) {
      throw ConfigError(
          "A BERT predicts masked tokens or classes (--task mlm, classify), and not the next token "
          "of a text. Give another model.");
    }
    sizes_.head = head;
    if (head == Head::classes) sizes_.labels = std::move(labels);
  }
  int64_t padding() const override { return sizes_.padding; }
  void set_dropout(double probability) override {
    sizes_.hidden_dropout = sizes_.attention_dropout = probability;
    sizes_.classifier_dropout = -1;
  }
  void validate() const override { sizes_.validate(); }
  std::string to_json() const override { return sizes_.to_json(); }
  std::string description() const override {
    return fmt::format("bert for {}, {} layers, {} wide",
                       sizes_.head == Head::classes
                           ? fmt::format("{} classes", sizes_.labels.size())
                           : "masked tokens",
                       sizes_.layers, sizes_.width);
  }
  std::unique_ptr<LanguageModel> build() const override;

 private:
  BertConfig sizes_;
};

class BertLanguageModel final : public LanguageModel {
 public:
  explicit BertLanguageModel(const BertConfig& sizes) : config_(sizes), model_(sizes) {}

  torch::nn::Module& module() override { return *model_; }
  const LanguageModelConfig& config() const override { return config_; }
  Encoder* encoder() override { return model_.get(); }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const at::Tensor& positions) override {
    if (positions.defined()) no_packed_documents();
    return model_->loss({tokens}, targets);
  }
  LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets,
                       const std::vector<at::Tensor>& positions) override {
    if (!positions.empty()) no_packed_documents();
    std::vector<Texts> texts;
    for (auto& each : tokens) texts.push_back({std::move(each)});
    return model_->layers(std::move(texts), std::move(targets));
  }
  at::Tensor logits(const at::Tensor& tokens, const at::Tensor& positions) override {
    if (positions.defined()) no_packed_documents();
    return model_->logits({tokens});
  }
  at::Tensor logits_last(const at::Tensor& /*tokens*/) override { return no_next_token(); }
  std::vector<at::Tensor> logits_next_of(const std::vector<at::Tensor>& /*tokens*/,
                                         const std::vector<KeyValueCache*>& /*caches*/) override {
    no_next_token();
  }
  void recompute(RecomputeSettings settings) override { model_->recompute(std::move(settings)); }
  std::map<std::string, TensorPlace> export_places() override { return tile_places(*model_); }
  std::string embedding() const override { return "bert.embeddings.word_embeddings.weight"; }
  std::map<std::string, std::string> tied_names() const override {
    if (config_.head() == Head::classes) return {};
    return {{"cls.predictions.decoder.weight", embedding()},
            {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
  }
  std::set<std::string> head_parameters() const override {
    std::set<std::string> names;
    for (const auto& parameter : model_->named_parameters()) {
      const auto& name = parameter.key();
      if (!name.starts_with("bert.") || name.starts_with("bert.pooler.")) names.insert(name);
    }
    return names;
  }

 private:
  [[noreturn]] static at::Tensor no_next_token() {
    throw ConfigError(
        "A BERT does not predict the next token of a text, so it cannot continue one. Give another "
        "model.");
  }

  [[noreturn]] static void no_packed_documents() {
    throw ConfigError(
        "A BERT attends to its whole row, and takes no positions of documents that are packed into "
        "one. Give each text a row of its own (Encoder), or another model.");
  }

  BertLanguageModelConfig config_;
  Bert model_;
};

std::unique_ptr<LanguageModel> BertLanguageModelConfig::build() const {
  return std::make_unique<BertLanguageModel>(sizes_);
}

}  // namespace

Architecture bert_architecture() {
  return {.model_type = "bert",
          .names = {},
          .preset = {},
          .from_json = [](std::string_view json, std::string_view source) {
            return std::make_unique<BertLanguageModelConfig>(BertConfig::from_json(json, source));
          }};
}

}  // namespace zero
