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

/// The loss of a batch of the validation, the batch's weight (Task::weight), and how many of its
/// texts are classified rightly.
struct Loss {
  double mean = 0;
  double weight = 1;
  std::optional<int64_t> correct{};
};

/// Passes this rank's `count` batches from `first` on, and returns the losses of all ranks in rank
/// order. If there are not enough, the last batch of the validation passes again, since every rank
/// must pass equally many: parameters are gathered together.
std::vector<Loss> pass(const Evaluated& of, int64_t first, int64_t count) {
  std::vector<Batch> batches;
  std::vector<double> weights;
  for (int64_t i = 0; i < count; ++i) {
    auto batch = of.task.validation_batch(std::min(first + i, of.task.validation_batches() - 1));
    weights.push_back(of.task.weight(batch));
    batches.push_back(on_device(std::move(batch), of.group.device()));
  }
  const Autocast casts(of.autocast, of.group.device().type());
  const auto model = of.task.layers(std::move(batches));
  auto values = model.inputs();
  for (const auto& layer : model.layers) {
    for (auto& value : values) value = layer(value);
  }
  // If all weights are equal, ranks do not send them.
  const int64_t weight = of.task.step_weight() ? 0 : 1;
  const int64_t correct = model.correct ? weight + 1 : 0;
  const int64_t numbers = std::max(weight, correct) + 1;
  const auto mine = at::empty({numbers * count}, at::kFloat);
  for (int64_t i = 0; i < count; ++i) {
    auto* of_batch = mine.mutable_data_ptr<float>() + numbers * i;
    const auto last = std::exchange(values[static_cast<size_t>(i)], {});
    of_batch[0] = model.loss(last, i).item<float>();
    if (weight > 0) of_batch[weight] = static_cast<float>(weights[static_cast<size_t>(i)]);
    if (correct > 0) of_batch[correct] = static_cast<float>(model.correct(last, i));
  }
  const auto all = at::empty({of.group.size() * mine.numel()}, at::kFloat);
  of.group.all_gather_control(all, mine, "validation losses");
  std::vector<Loss> losses;
  for (int64_t i = 0; i < all.numel(); i += numbers) {
    const auto* of_batch = all.const_data_ptr<float>() + i;
    losses.push_back({.mean = of_batch[0], .weight = weight > 0 ? of_batch[weight] : 1.0});
    if (correct > 0) losses.back().correct = static_cast<int64_t>(of_batch[correct]);
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
      if (loss.correct) mean.correct = mean.correct.value_or(0) + *loss.correct;
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
  ValidationReport report{
      .step = step, .loss = mean->loss, .tokens = run.task->validation_tokens()};
  if (mean->correct) report.accuracy = Accuracy{*mean->correct, run.task->validation_batches()};
  return report;
}

}  // namespace zero::train
