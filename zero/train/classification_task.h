// Classification: each text, or pair of texts, belongs to one of several classes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/data/labelled_texts.h"
#include "zero/models/language/language_model.h"
#include "zero/train/task.h"

namespace zero::train {

struct ClassificationOptions {
  int64_t longest = 0;      ///< texts are shortened to so many tokens
  int64_t micro_batch = 1;  ///< texts that a rank takes at a time
  int64_t rank = 0;
  int64_t ranks = 1;
  uint64_t seed = 0;
  int64_t micro_batches = 1;       ///< of all ranks in a step
  int64_t validation_texts = 0;    ///< at most so many, evenly from the split
  std::vector<int64_t> classes{};  ///< by the label of the data: the class of the model
};

/// A batch is tokens and types, (B, T) int64, a mask (B, T) and labels (B) int64. T is the longest
/// of the batch: no more is padded. Texts are taken in the order of Note [Order of samples]; a text
/// that is validated passes alone.
class ClassificationTask final : public Task {
 public:
  /// `model` classifies (Head::classes), and outlives this. DataError for fewer texts than a
  /// micro-step of all ranks takes.
  ClassificationTask(LanguageModel& model, LabelledTexts training,
                     std::optional<LabelledTexts> validation, ClassificationOptions options);

  Batch next() override;
  LoaderState position() const override;
  void restore(const LoaderState& position) override;
  int64_t validation_batches() const override { return static_cast<int64_t>(chosen_.size()); }
  int64_t validation_tokens() const override { return validation_tokens_; }
  Batch validation_batch(int64_t index) override;
  double weight(const Batch& batch) const override {
    return static_cast<double>(batch.back().size(0));
  }
  std::optional<double> step_weight() const override {
    return static_cast<double>(options_.micro_batch * options_.micro_batches);
  }
  at::Tensor loss(const Batch& batch) override;
  at::Tensor logits(const Batch& batch) override;
  LayerSequence layers(std::vector<Batch> batches) override;

 private:
  Batch batch_of(const LabelledTexts& texts, const std::vector<int64_t>& indices) const;

  LanguageModel& model_;
  LabelledTexts training_;
  std::optional<LabelledTexts> validation_;
  ClassificationOptions options_;
  int64_t sample_ = 0;
  std::vector<int64_t> chosen_;  // of the validation
  int64_t validation_tokens_ = 0;
};

}  // namespace zero::train
