// Makes the task of a run from its settings.
#pragma once

#include <memory>
#include <optional>

#include "zero/data/labelled_texts.h"
#include "zero/data/masking.h"
#include "zero/models/language/language_model.h"
#include "zero/train/options.h"
#include "zero/train/task.h"
#include "zero/train/validation.h"

namespace zero::train {

/// Returns what a run learns: never TrainingTask::any. `sizes` have the head of choose_head. Throws
/// DataError if it should predict marked tokens, and there are no marks.
TrainingTask task_of(const Options& options, const Dataset& data, const LanguageModelConfig& sizes);

/// Gives the model the head that the task asks for; classes have the names of the data, or those of
/// a model that has such a head already. Without data the classes may stay open. Throws ConfigError
/// if the model has no such head, and DataError for labels that the model does not have.
void choose_head(LanguageModelConfig& sizes, const Options& options, const Dataset& data);

/// The data of a task, at their beginning.
struct TaskData {
  TrainingTask task = TrainingTask::language;
  std::optional<TokenLoader> tokens{};  ///< of all tasks but classification
  std::optional<Validation> validation{};
  std::optional<Masking> masking{};
  std::optional<Masking> validation_masking{};
  std::optional<LabelledTexts> texts{};  ///< of classification
  std::optional<LabelledTexts> validation_texts{};
  std::vector<int64_t> classes{};  ///< by the label of the data: the class of the model
};

/// Opens the data of rank `rank`. Throws ConfigError and DataError as the classes of the data do.
TaskData task_data(const Options& options, const Dataset& data, const LanguageModelConfig& sizes,
                   int rank, int ranks);

/// Throws DataError unless a run with this data may go on at a position.
void check_position(const TaskData& data, const Options& options, const LoaderState& position);

/// Makes the task. `micro_batches` are those of all ranks in a step.
std::unique_ptr<Task> make_task(LanguageModel& model, TaskData data, const Options& options,
                                int rank, int ranks, int64_t micro_batches);

}  // namespace zero::train
