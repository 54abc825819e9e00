#include "zero/train/validator.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "zero/base/autocast.h"
#include "zero/train/evaluation.h"

namespace zero::train {
namespace {

/// The loss of a batch of the validation, and the batch's weight (Task::weight).
struct Loss {
  double mean = 0;
  double weight = 1;
};

/// Passes this rank's `count` batches from `first` on, and returns the losses of all ranks in rank
/// order. If there are not enough, the last batch of the validation passes again, since every rank
/// must pass equally many: parameters are gathered together.
std::vector<Loss> pass(const Evaluated& of, int64_t first, int64_t count) {
  // If all weights are equal, ranks send only losses.
  const int64_t numbers = of.task.step_weight() ? 1 : 2;
  const auto mine = at::empty({numbers * count}, at::kFloat);
  auto* values_of = mine.mutable_data_ptr<float>();
  std::vector<Batch> batches;
  for (int64_t i = 0; i < count; ++i) {
    auto batch = of.task.validation_batch(std::min(first + i, of.task.validation_batches() - 1));
    if (numbers > 1) values_of[numbers * i + 1] = static_cast<float>(of.task.weight(batch));
    batches.push_back(on_device(std::move(batch), of.group.device()));
  }
  const Autocast casts(of.autocast, of.group.device().type());
  const auto model = of.task.layers(std::move(batches));
  auto values = model.inputs();
  for (const auto& layer : model.layers) {
    for (auto& value : values) value = layer(value);
  }
  for (int64_t i = 0; i < count; ++i) {
    values_of[numbers * i] =
        model.loss(std::exchange(values[static_cast<size_t>(i)], {}), i).item<float>();
  }
  const auto all = at::empty({of.group.size() * mine.numel()}, at::kFloat);
  of.group.all_gather_control(all, mine, "validation losses");
  std::vector<Loss> losses;
  for (int64_t i = 0; i < all.numel(); i += numbers) {
    const auto* of_batch = all.const_data_ptr<float>() + i;
    losses.push_back({of_batch[0], numbers > 1 ? of_batch[1] : 1.0});
  }
  return losses;
}

}  // namespace

std::optional<MeanLoss> mean_loss(const Evaluated& of, const std::function<bool()>& stop) {
  const EvaluationMode evaluation(of.model);
  const int64_t count = of.task.validation_batches();
  const int64_t ranks = of.group.size();
  MeanLoss mean;
  for (int64_t done = 0; done < count;) {
    if (stop()) return std::nullopt;
    const int64_t rows = std::min(of.rows, at::ceil_div(count - done, ranks));
    const auto losses = pass(of, done + of.group.rank() * rows, rows);
    for (int64_t row = 0; row < ranks * rows && done + row < count; ++row) {
      const auto& loss = losses[static_cast<size_t>(row)];
      mean.loss += loss.mean * loss.weight;
      mean.weight += loss.weight;
    }
    done += ranks * rows;
  }
  mean.loss /= mean.weight;
  return mean;
}

std::optional<ValidationReport> validate(Run& run, int64_t step,
                                         const std::function<bool()>& stop) {
  const auto mean = mean_loss({.task = *run.task,
                               .model = run.model->module(),
                               .group = *run.group,
                               .autocast = run.engine->config().autocast_dtype(),
                               .rows = run.micro_batch_size()},
                              stop);
  if (!mean) return std::nullopt;
  return ValidationReport{
      .step = step, .loss = mean->loss, .tokens = run.task->validation_tokens()};
}

}  // namespace zero::train
