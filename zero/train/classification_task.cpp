#include "zero/train/classification_task.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "zero/base/error.h"
#include "zero/data/permutation.h"

namespace zero::train {
namespace {

Texts texts_of(const Batch& batch) { return {batch[0], batch[1], batch[2]}; }

}  // namespace

ClassificationTask::ClassificationTask(LanguageModel& model, LabelledTexts training,
                                       std::optional<LabelledTexts> validation,
                                       ClassificationOptions options)
    : model_(model),
      training_(std::move(training)),
      validation_(std::move(validation)),
      options_(std::move(options)) {
  const int64_t together = options_.ranks * options_.micro_batch;
  if (training_.size() < together) {
    throw DataError(
        fmt::format("The data have {} texts, fewer than the {} that {} ranks take at a time with a "
                    "micro-batch of {}. Use fewer ranks, a smaller micro-batch or more data.",
                    training_.size(), together, options_.ranks, options_.micro_batch));
  }
  if (!validation_) return;
  const int64_t count = std::min(options_.validation_texts, validation_->size());
  for (int64_t i = 0; i < count; ++i) {
    chosen_.push_back((2 * i + 1) * validation_->size() / (2 * count));
    validation_tokens_ += validation_->tokens(chosen_.back(), options_.longest);
  }
}

Batch ClassificationTask::batch_of(const LabelledTexts& texts,
                                   const std::vector<int64_t>& indices) const {
  std::vector<LabelledTexts::Text> rows;
  size_t longest = 0;
  for (const auto index : indices) {
    rows.push_back(texts.read(index, options_.longest));
    longest = std::max(longest, rows.back().tokens.size());
  }
  const std::array sizes{static_cast<int64_t>(rows.size()), static_cast<int64_t>(longest)};
  const auto tokens = at::full(sizes, std::max<int64_t>(0, model_.config().padding()), at::kLong);
  const auto types = at::zeros(sizes, at::kLong);
  const auto mask = at::zeros(sizes, at::kBool);
  const auto labels = at::zeros({sizes[0]}, at::kLong);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    const auto& text = rows[i];
    const auto count = static_cast<int64_t>(text.tokens.size());
    std::copy(text.tokens.begin(), text.tokens.end(),
              tokens.select(0, row).mutable_data_ptr<int64_t>());
    types.select(0, row).narrow(0, text.second, count - text.second).fill_(1);
    mask.select(0, row).narrow(0, 0, count).fill_(true);
    labels.mutable_data_ptr<int64_t>()[i] = options_.classes.at(static_cast<size_t>(text.label));
  }
  return {tokens, types, mask, labels};
}

Batch ClassificationTask::next() {
  std::vector<int64_t> indices;
  for (int64_t row = 0; row < options_.micro_batch; ++row) {
    const int64_t sample = sample_ + options_.rank * options_.micro_batch + row;
    const Permutation order(training_.size(), options_.seed,
                            static_cast<uint64_t>(sample / training_.size()));
    indices.push_back(order(sample % training_.size()));
  }
  sample_ += options_.ranks * options_.micro_batch;
  return batch_of(training_, indices);
}

LoaderState ClassificationTask::position() const {
  return {.sample = sample_,
          .sequence = options_.longest,
          .sequences = training_.size(),
          .seed = options_.seed};
}

void ClassificationTask::restore(const LoaderState& position) {
  check_same_data(position, this->position());
  sample_ = position.sample;
}

Batch ClassificationTask::validation_batch(int64_t index) {
  return batch_of(*validation_, {chosen_.at(static_cast<size_t>(index))});
}

at::Tensor ClassificationTask::loss(const Batch& batch) {
  return model_.encoder()->loss(texts_of(batch), batch[3]);
}

at::Tensor ClassificationTask::logits(const Batch& batch) {
  return model_.encoder()->logits(texts_of(batch));
}

LayerSequence ClassificationTask::layers(std::vector<Batch> batches) {
  std::vector<Texts> texts;
  std::vector<at::Tensor> labels;
  for (auto& batch : batches) {
    texts.push_back(texts_of(batch));
    labels.push_back(std::move(batch[3]));
  }
  return model_.encoder()->layers(std::move(texts), std::move(labels));
}

}  // namespace zero::train
