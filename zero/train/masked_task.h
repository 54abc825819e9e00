// Masked language modelling: tokens that are hidden are predicted (Note [Masked tokens]).
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "zero/data/masking.h"
#include "zero/train/supervised_task.h"

namespace zero::train {

/// A batch is as SupervisedTask's: its targets are the tokens that are hidden.
class MaskedTask final : public SupervisedTask {
 public:
  /// `rank` and `rows` say which samples of a micro-step are this rank's. A validation has masks of
  /// its own, which are the same every time.
  MaskedTask(LanguageModel& model, TokenLoader training, std::optional<Validation> validation,
             int64_t rows, int64_t micro_batches, Masking masking, Masking of_validation, int rank)
      : SupervisedTask(model, std::move(training), std::move(validation), rows, micro_batches),
        masking_(std::move(masking)),
        of_validation_(std::move(of_validation)),
        first_(rows * rank) {}

  Batch next() override {
    const int64_t first = position().sample + first_;
    // Targets are counted once tokens are masked. NOLINTNEXTLINE(bugprone-parent-virtual-call)
    return masked(LanguageTask::next(), first, masking_);
  }
  Batch validation_batch(int64_t index) override {
    // NOLINTNEXTLINE(bugprone-parent-virtual-call)
    return masked(LanguageTask::validation_batch(index), index, of_validation_);
  }

 private:
  static Batch masked(Batch batch, int64_t first, const Masking& masking) {
    const auto columns = static_cast<size_t>(batch[0].size(1));
    for (int64_t row = 0; row < batch[0].size(0); ++row) {
      const auto values = [&](const at::Tensor& of) {
        return std::span(of.select(0, row).mutable_data_ptr<int64_t>(), columns);
      };
      masking.apply(first + row, values(batch[0]), values(batch[1]));
    }
    return counted(std::move(batch));
  }

  Masking masking_;
  Masking of_validation_;
  int64_t first_;
};

}  // namespace zero::train
