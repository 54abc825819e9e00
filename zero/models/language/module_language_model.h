// A language model over a module that computes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/models/language/language_model.h"
#include "zero/models/layers/tiled_linear.h"

namespace zero {

/// Names in a module, as other programs have them.
struct ModuleNames {
  std::string embedding;         ///< the embedding's weight
  std::string path_prefix = {};  ///< LanguageModel::path_prefix
};

/// `Holder` holds a module with the functions of LanguageModel, and `Config` is the
/// LanguageModelConfig of its sizes.
template <class Holder, class Config>
class ModuleLanguageModel final : public LanguageModel {
 public:
  /// Builds the module of these sizes, and the config from them and from `more`. If the sizes tie
  /// the head to the embedding, `names` says which weight that is.
  template <class Sizes, class... More>
  ModuleLanguageModel(const Sizes& sizes, ModuleNames names, const More&... more)
      : config_(sizes, more...),
        model_(sizes),
        names_(std::move(names)),
        tied_(sizes.tie_word_embeddings) {}

  torch::nn::Module& module() override { return *model_; }
  const LanguageModelConfig& config() const override { return config_; }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets,
                  const at::Tensor& positions) override {
    return model_->loss(tokens, targets, positions);
  }
  LayerSequence layers(std::vector<at::Tensor> tokens, std::vector<at::Tensor> targets,
                       const std::vector<at::Tensor>& positions) override {
    return model_->layers(std::move(tokens), std::move(targets), positions);
  }
  at::Tensor logits(const at::Tensor& tokens, const at::Tensor& positions) override {
    return model_->logits(tokens, positions);
  }
  at::Tensor logits_last(const at::Tensor& tokens) override { return model_->logits_last(tokens); }
  std::vector<at::Tensor> logits_next_of(const std::vector<at::Tensor>& tokens,
                                         const std::vector<KeyValueCache*>& caches) override {
    return model_->logits_next(tokens, caches);
  }
  void recompute(RecomputeSettings settings) override { model_->recompute(std::move(settings)); }
  /// Parameters have Hugging Face's names, except for the tiles of a linear layer.
  std::map<std::string, TensorPlace> export_places() override { return tile_places(*model_); }
  std::map<std::string, std::string> tied_names() const override {
    if (!tied_) return {};
    return {{"lm_head.weight", names_.embedding}};
  }
  std::string embedding() const override { return names_.embedding; }
  std::string path_prefix() const override { return names_.path_prefix; }

 private:
  Config config_;
  Holder model_;
  ModuleNames names_;
  bool tied_;
};

}  // namespace zero
