// Language modelling: the next token of each position is predicted.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "zero/models/language/language_model.h"
#include "zero/train/task.h"
#include "zero/train/validation.h"

namespace zero::train {

/// A batch is tokens and targets, (B, T) int64 each, and at its end the positions of packed
/// documents, if the loaders give them. The weight of a batch is its number of sequences, which all
/// have T targets.
class LanguageTask : public Task {
 public:
  /// A step has `micro_batches` of `rows` sequences on all ranks together. `model` outlives this.
  LanguageTask(LanguageModel& model, TokenLoader training, std::optional<Validation> validation,
               int64_t rows, int64_t micro_batches)
      : model_(model),
        training_(std::move(training)),
        validation_(std::move(validation)),
        documents_(training_.documents()),
        step_weight_(static_cast<double>(rows * micro_batches)) {}

  Batch next() override { return batch_of(training_.next()); }
  LoaderState position() const override { return training_.state(); }
  void restore(const LoaderState& position) override { training_.restore(position); }
  int64_t validation_batches() const override { return validation_ ? validation_->sequences() : 0; }
  int64_t validation_tokens() const override { return validation_ ? validation_->tokens() : 0; }
  Batch validation_batch(int64_t index) override { return batch_of(validation_->read(index)); }

  double weight(const Batch& batch) const override {
    return static_cast<double>(batch.front().size(0));
  }
  std::optional<double> step_weight() const override { return step_weight_; }

  at::Tensor loss(const Batch& batch) override {
    return model_.loss(batch[0], batch[1], positions_of(batch));
  }
  at::Tensor logits(const Batch& batch) override {
    return model_.logits(batch[0], positions_of(batch));
  }
  LayerSequence layers(std::vector<Batch> batches) override {
    std::vector<at::Tensor> tokens;
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> positions;
    for (auto& batch : batches) {
      if (documents_) positions.push_back(positions_of(batch));
      tokens.push_back(std::move(batch[0]));
      targets.push_back(std::move(batch[1]));
    }
    return model_.layers(std::move(tokens), std::move(targets), positions);
  }

 protected:
  static Batch batch_of(const TokenLoader::Batch& batch) {
    Batch all{batch.tokens, batch.targets};
    if (batch.positions.defined()) all.push_back(batch.positions);
    return all;
  }

 private:
  at::Tensor positions_of(const Batch& batch) const {
    return documents_ ? batch.back() : at::Tensor();
  }

  LanguageModel& model_;
  TokenLoader training_;
  std::optional<Validation> validation_;
  bool documents_;
  double step_weight_;
};

}  // namespace zero::train
