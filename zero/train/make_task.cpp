#include "zero/train/make_task.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "zero/base/class_names.h"
#include "zero/base/error.h"
#include "zero/data/chat_template.h"
#include "zero/data/labelled_text.h"
#include "zero/data/tokenizer.h"
#include "zero/train/classification_task.h"
#include "zero/train/language_task.h"
#include "zero/train/masked_task.h"
#include "zero/train/parts.h"
#include "zero/train/supervised_task.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kSeedOfValidation = 0x76616c6964617465;

/// Masks as the tokenizer of the data says, or that of the model's folder.
Masking masking_of(const Options& options, const Dataset& data, int64_t vocabulary, uint64_t seed) {
  std::error_code ignored;
  auto file = data.tokenizer;
  if (file.empty() && !options.from.empty() &&
      fs::exists(fs::path(options.from) / "tokenizer.json", ignored))
    file = fs::path(options.from) / "tokenizer.json";
  std::vector<int64_t> special;
  auto mask = options.mask_token;
  if (!file.empty() && file.extension() == ".json") {
    const auto tokenizer = Tokenizer::load(file);
    special = tokenizer.special_tokens();
    vocabulary = std::min(vocabulary, tokenizer.vocab_size());
    const auto name = special_token(file.parent_path(), "mask_token");
    if (!mask) mask = tokenizer.token(name.empty() ? "[MASK]" : name);
  }
  if (!mask) {
    throw DataError(fmt::format(
        "The task mlm needs a token that hides others, and {} names none. Prepare the data with "
        "the "
        "model's tokenizer (zero data prepare --tokenizer DIR), or give --mask-token N.",
        file.empty() ? "no tokenizer.json of the data" : file.string()));
  }
  return {*mask, std::move(special), vocabulary, seed};
}

/// Throws DataError unless all of the data have marks.
void check_marks(const Dataset& data) {
  for (const auto* split : {&data.train, &data.validation}) {
    for (const auto& source : split->sources) {
      if (source.tokens->marked()) continue;
      const auto name = source.tokens->name();
      throw DataError(fmt::format(
          "The option 'task' is sft, but {} has no marks of the tokens that are to be predicted "
          "({}). Prepare the data with answers, leave --task out (of data without marks all tokens "
          "are then learned), or give --task lm.",
          name, marks_of(fs::path(name)).filename().string()));
    }
  }
}

}  // namespace

TrainingTask task_of(const Options& options, const Dataset& data,
                     const LanguageModelConfig& sizes) {
  if (options.task == TrainingTask::supervised) check_marks(data);
  const bool next_token = sizes.head() == Head::next_token;
  if (next_token && !data.labels.empty() && options.task != TrainingTask::language) {
    throw DataError(fmt::format(
        "{} has texts with labels, and the model predicts the next token: none of the tokens is "
        "marked as an answer. Give a BERT and --task classify, or --task lm.",
        data.train.name()));
  }
  if (options.task != TrainingTask::any) return options.task;
  if (sizes.head() == Head::masked_token) return TrainingTask::masked;
  if (sizes.head() == Head::classes) return TrainingTask::classes;
  return data.train.marked() ? TrainingTask::supervised : TrainingTask::language;
}

void choose_head(LanguageModelConfig& sizes, const Options& options, const Dataset& data) {
  switch (options.task) {
    case TrainingTask::any:
      return;
    case TrainingTask::language:
    case TrainingTask::supervised:
      return sizes.set_head(Head::next_token, {});
    case TrainingTask::masked:
      return sizes.set_head(Head::masked_token, {});
    case TrainingTask::classes:
      if (sizes.head() == Head::classes) return;
      sizes.set_head(Head::classes, data.labels.empty() ? class_names(2) : data.labels);
  }
}

TaskData task_data(const Options& options, const Dataset& data, const LanguageModelConfig& sizes,
                   int rank, int ranks) {
  TaskData made{.task = task_of(options, data, sizes)};
  if (options.document_attention && sizes.head() != Head::next_token) {
    throw ConfigError(
        fmt::format("The option 'document_attention' is for models that predict the next token, "
                    "and this is a {}: it attends to {}. Leave the option out.",
                    sizes.description(),
                    made.task == TrainingTask::classes ? "one text, which has a row of its own"
                                                       : "the whole of a sequence"));
  }
  const auto vocabulary = sizes.vocab_size();
  const bool validates = options.eval_tokens > 0;
  if (made.task == TrainingTask::classes) {
    const auto classes = static_cast<int64_t>(data.labels.size());
    if (data.train.sources.size() > 1) {
      throw ConfigError(fmt::format(
          "The task classify takes one data set, and --data names {}. Prepare their lines together "
          "(zero data prepare --classify A B --out DIR).",
          data.train.sources.size()));
    }
    made.texts.emplace(data.train.sources.front(), vocabulary, classes);
    if (validates)
      made.validation_texts.emplace(data.validation.sources.front(), vocabulary, classes);
    made.classes = classes_in(sizes.labels(), data.labels);
    return made;
  }
  auto loader = loader_options(options, rank, ranks, vocabulary);
  loader.marks = made.task == TrainingTask::supervised;
  loader.documents = options.document_attention;
  made.tokens.emplace(data.train, loader);
  if (validates) {
    made.validation.emplace(data.validation, options.seq, vocabulary, options.eval_tokens,
                            loader.marks, loader.documents);
  }
  if (made.task == TrainingTask::masked) {
    made.masking.emplace(masking_of(options, data, vocabulary, loader.seed));
    made.validation_masking.emplace(masking_of(options, data, vocabulary, kSeedOfValidation));
  }
  return made;
}

void check_position(const TaskData& data, const Options& options, const LoaderState& position) {
  if (!data.texts) {
    auto loader = *data.tokens;
    return loader.restore(position);
  }
  check_same_data(position, {.sequence = options.seq,
                             .sequences = data.texts->size(),
                             .seed = static_cast<uint64_t>(options.seed)});
}

std::unique_ptr<Task> make_task(LanguageModel& model, TaskData data, const Options& options,
                                int rank, int ranks, int64_t micro_batches) {
  const int64_t rows = *options.micro_batch_size;
  if (data.texts) {
    return std::make_unique<ClassificationTask>(
        model, std::move(*data.texts), std::move(data.validation_texts),
        ClassificationOptions{.longest = options.seq,
                              .micro_batch = rows,
                              .rank = rank,
                              .ranks = ranks,
                              .seed = static_cast<uint64_t>(options.seed),
                              .micro_batches = micro_batches,
                              .validation_texts = at::ceil_div(options.eval_tokens, options.seq),
                              .classes = std::move(data.classes)});
  }
  auto& tokens = *data.tokens;
  auto& validation = data.validation;
  if (data.masking) {
    return std::make_unique<MaskedTask>(model, std::move(tokens), std::move(validation), rows,
                                        micro_batches, std::move(*data.masking),
                                        std::move(*data.validation_masking), rank);
  }
  // Sequences of several documents do not all have as many targets.
  if (data.task == TrainingTask::supervised || options.document_attention) {
    return std::make_unique<SupervisedTask>(model, std::move(tokens), std::move(validation), rows,
                                            micro_batches);
  }
  return std::make_unique<LanguageTask>(model, std::move(tokens), std::move(validation), rows,
                                        micro_batches);
}

}  // namespace zero::train
