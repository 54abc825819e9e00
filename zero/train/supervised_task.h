// Supervised fine-tuning: of a text, the tokens that are marked are predicted (Note [Marks of
// tokens]).
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

#include "zero/train/language_task.h"

namespace zero::train {

/// A batch is tokens, targets, (B, T) int64 each, the number of targets that are not -100, ()
/// int64, which is its weight, and the positions of packed documents, as LanguageTask's. A batch
/// may have no target: its loss is 0.
class SupervisedTask : public LanguageTask {
 public:
  using LanguageTask::LanguageTask;

  Batch next() override { return counted(LanguageTask::next()); }
  Batch validation_batch(int64_t index) override {
    return counted(LanguageTask::validation_batch(index));
  }

  double weight(const Batch& batch) const override {
    return static_cast<double>(batch[2].item<int64_t>());
  }
  std::optional<double> step_weight() const override { return std::nullopt; }

  at::Tensor loss(const Batch& batch) override {
    return LanguageTask::loss(batch) * batch[2].sign();
  }
  LayerSequence layers(std::vector<Batch> batches) override {
    std::vector<at::Tensor> signs;
    for (const auto& batch : batches) signs.push_back(batch[2].sign());
    auto sequence = LanguageTask::layers(std::move(batches));
    sequence.loss = [inner = std::move(sequence.loss), signs = std::move(signs)](
                        const std::vector<at::Tensor>& x, int64_t micro_batch) {
      return inner(x, micro_batch) * signs[static_cast<size_t>(micro_batch)];
    };
    return sequence;
  }

 protected:
  static Batch counted(Batch batch) {
    auto count = (batch[1] != -100).sum();
    // A mean over no target is not a number, and every rank must pass backward: the first target
    // counts then, times 0.
    if (count.item<int64_t>() == 0) {
      batch[1] = batch[1].clone();
      batch[1].select(0, 0).select(0, 0).fill_(0);
    }
    batch.insert(batch.begin() + 2, std::move(count));
    return batch;
  }
};

}  // namespace zero::train
