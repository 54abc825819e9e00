#include "zero/train/evaluate.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_texts.h"
#include "zero/data/prepare.h"
#include "zero/models/architectures.h"
#include "zero/train/evaluation.h"
#include "zero/train/loaded_model.h"
#include "zero/train/make_task.h"
#include "zero/train/parts.h"
#include "zero/train/tuning.h"
#include "zero/train/validator.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kAll = int64_t{1} << 50;  // tokens

/// A folder that goes with this.
class PassingFolder {
 public:
  PassingFolder() {
    std::error_code ignored;
    auto name = (fs::temp_directory_path(ignored) / "zero-eval-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw DataError(fmt::format("Cannot make the folder {} for encoded text.", name));
    path_ = name;
  }
  ~PassingFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  PassingFolder(const PassingFolder&) = delete;
  PassingFolder& operator=(const PassingFolder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Returns the sizes of the model beneath an adapter, with the head that the adapter brings.
std::unique_ptr<LanguageModelConfig> sizes_of(const Options& program) {
  auto sizes = language_model_config(program.from);
  choose_head_of_adapter(*sizes, program);
  return sizes;
}

/// Maps files of tokens to the texts that were encoded to them.
using EncodedTexts = std::map<std::string, std::string>;

/// Calls `body`, whose DataErrors then name the texts in place of the files of their tokens.
template <class Body>
auto naming_texts(const EncodedTexts& texts, const Body& body) {
  try {
    return body();
  } catch (const DataError& error) {
    if (dynamic_cast<const comm::PeerFailure*>(&error) != nullptr) throw;
    std::string message = error.what();
    for (const auto& [file, text] : texts) {
      for (auto at = message.find(file); at != std::string::npos;
           at = message.find(file, at + text.size()))
        message.replace(at, file.size(), text);
    }
    throw DataError(message);
  }
}

/// Returns the tokens of `data`, all of them as both splits. Rank 0 encodes text, in `folder`.
/// Collective.
Dataset open(const Options& program, fs::path data, std::optional<PassingFolder>& folder,
             EncodedTexts& texts, comm::Group& group) {
  std::error_code ignored;
  const auto given = data.string();
  if (!fs::exists(data, ignored))
    throw DataError(fmt::format("There is no file and no folder {}.", given));
  if (fs::is_directory(data, ignored)) {
    auto set = open_dataset(data, {.validation_fraction = 0.0});
    if (set.validation.sources.empty()) {
      throw DataError(
          fmt::format("The folder {} has no validation split. Give a file of it.", given));
    }
    set.train = set.validation;
    return set;
  }
  const bool lines = data.extension() == ".jsonl";
  if (program.document_attention && !lines && data.extension() != ".bin") {
    throw DataError(fmt::format(
        "Attention is to stay inside of documents (--document-attention), and {} is text, which "
        "does not say where they begin. Give JSON lines (.jsonl), each of which is a document, or "
        "what `zero data prepare --jsonl` made, or leave the option out.",
        given));
  }
  const auto tokenizer = fs::path(program.from) / "tokenizer.json";
  const auto sizes = sizes_of(program);
  const bool classify = program.task == TrainingTask::classes ||
                        (program.task == TrainingTask::any && sizes->head() == Head::classes);
  if (data.extension() != ".bin" && !lines && classify) {
    throw DataError(
        fmt::format("{} is text without labels. Give JSON lines ({{\"text\": ..., \"label\": ...}} "
                    "in a .jsonl) or "
                    "what `zero data prepare --classify` made.",
                    given));
  }
  if (lines || (data.extension() != ".bin" && fs::exists(tokenizer, ignored))) {
    comm::agree_on_rank_zero<DataError>(group, "Encoding the text", [&] {
      folder.emplace();
      prepare({.inputs = {data},
               .output = folder->path() / "data",
               .tokenizer = tokenizer.string(),
               .whole = true,
               .json_lines = lines && !classify,
               .classify = lines && classify});
    });
    const auto place = folder ? folder->path().string() : std::string();
    data = fs::path(comm::gather_texts(group, place, "folder").front()) / "data" / "train.bin";
    texts[data.string()] = given;
  } else if (data.extension() != ".bin" && sizes->vocab_size() != 256) {
    throw DataError(fmt::format(
        "{} is text, and {} has no tokenizer.json: its bytes are no tokens of a vocabulary of {}. "
        "Give what `zero data prepare` made with the model's tokenizer.",
        given, program.from, sizes->vocab_size()));
  }
  auto set = open_dataset(data, {.validation_fraction = 0.0});
  set.validation = set.train;
  return set;
}

/// Opens all of the data, which are measured one after the other. `folders` are those of encoded
/// text. Collective.
Dataset open_all(const Options& program, std::vector<std::optional<PassingFolder>>& folders,
                 EncodedTexts& texts, comm::Group& group) {
  std::vector<Dataset> parts;
  for (size_t i = 0; i < program.data.size(); ++i)
    parts.push_back(open(program, program.data[i], folders[i], texts, group));
  return naming_texts(texts, [&] { return join(std::move(parts)); });
}

/// Returns the length of the sequences that the data are cut into, where the user has not said it:
/// a short text is one sequence.
int64_t length_for(const Split& data, int64_t longest) {
  const auto least = [](const TokenRange& source) {
    return std::max<int64_t>(1, source.size() - 1);
  };
  if (data.sources.size() == 1) return std::min(longest, least(data.sources.front()));
  for (const auto& source : data.sources) {
    if (source.size() > longest) continue;
    throw DataError(fmt::format(
        "{} has {} tokens, and a sequence of {} with its target needs {}. Data that are measured "
        "as one have sequences of one length: give --seq {}, or measure each by itself.",
        source.tokens->name(), source.size(), longest, longest + 1, least(source)));
  }
  return longest;
}

/// Throws ConfigError unless the file of logits can be made. Rank 0 looks. Collective.
void check_logits(const std::string& path, comm::Group& group) {
  if (path.empty()) return;
  comm::agree_on_rank_zero<ConfigError>(group, "Making the file of logits", [&] {
    std::error_code ignored;
    if (fs::symlink_status(path, ignored).type() != fs::file_type::not_found) {
      throw ConfigError(fmt::format(
          "The logits are to be written to {}, which is there. Give another --logits FILE, or "
          "remove it.",
          path));
    }
    try {
      const OutputFile probe(path, fail<ConfigError>);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{} Give another --logits FILE.", error.what()));
    }
  });
}

Options program_of(const EvaluateOptions& options) {
  auto program = options_of_model(options.from, options.adapter, options.quantize_base);
  if (options.data.empty()) throw ConfigError("There are no data to measure the model on.");
  program.data = options.data;
  program.task = options.task;
  program.mask_token = options.mask_token;
  program.document_attention = options.document_attention;
  program.seq = options.seq > 0
                    ? options.seq
                    : std::min<int64_t>(1024, language_model_config(program.from)->context());
  program.micro_batch_size = 1;  // of the training data, of which none is read
  program.eval_tokens = options.tokens > 0 ? options.tokens : kAll;
  return program;
}

/// Writes logits as they come.
class LogitsFile {
 public:
  LogitsFile(const std::string& path, Task& task, bool classifies, const LanguageModelConfig& sizes)
      : classifies_(classifies) {
    const int64_t count = task.validation_batches();
    const auto first = task.validation_batch(0);
    const int64_t length = first[0].size(1);
    std::vector<TensorInfo> infos;
    if (classifies) {
      const auto classes = static_cast<int64_t>(sizes.labels().size());
      logits_ = at::empty({count, classes}, at::kFloat);
      labels_ = at::empty({count}, at::kLong);
      infos = {{"logits", at::kFloat, {count, classes}}, {"labels", at::kLong, {count}}};
    } else {
      tokens_ = at::empty({count, length}, at::kLong);
      labels_ = at::empty({count, length}, at::kLong);
      infos = {{"tokens", at::kLong, {count, length}}, {"targets", at::kLong, {count, length}}};
      for (int64_t i = 0; i < count; ++i)
        infos.push_back({name_of(i), at::kFloat, {length, sizes.vocab_size()}});
    }
    file_.emplace(path, std::move(infos));
  }

  void add(int64_t index, const at::Tensor& logits, const Batch& batch) {
    const auto labels = labels_.select(0, index).copy_(batch[classifies_ ? 3 : 1].select(0, 0));
    if (classifies_) {
      logits_.select(0, index).copy_(logits);
    } else {
      // Without a target a batch has one that counts nothing (SupervisedTask::counted).
      const bool counts = batch.size() > 2;
      if (counts && batch[2].item<int64_t>() == 0) labels.fill_(-100);
      tokens_.select(0, index).copy_(batch[0].select(0, 0));
      file_->write(name_of(index), logits);
    }
  }

  void commit() {
    file_->write(classifies_ ? "labels" : "targets", labels_);
    file_->write(classifies_ ? "logits" : "tokens", classifies_ ? logits_ : tokens_);
    file_->commit();
  }

 private:
  static std::string name_of(int64_t index) { return fmt::format("logits.{}", index); }

  bool classifies_;
  at::Tensor logits_, labels_, tokens_;
  std::optional<SafetensorsWriter> file_;
};

/// Writes the file, which rank 0 has. Each rank passes a batch at a time; rank 0 gets the logits of
/// all. Collective.
void write_logits(const Evaluated& of, std::optional<LogitsFile>& file) {
  const EvaluationMode evaluation(of.model);
  const int64_t count = of.task.validation_batches();
  const int64_t ranks = of.group.size();
  std::exception_ptr failure;  // the passes are collective: they go on
  for (int64_t done = 0; done < count; done += ranks) {
    const auto mine = std::min(done + of.group.rank(), count - 1);
    const auto batch = on_device(of.task.validation_batch(mine), of.group.device());
    const Autocast casts(of.autocast, of.group.device().type());
    const auto logits = of.task.logits(batch).to(at::kFloat).select(0, 0).contiguous();
    const auto all = at::empty({ranks * logits.numel()}, logits.options());
    of.group.all_gather(all, logits.view({-1}), "logits").wait();
    if (of.group.rank() != 0 || failure) continue;
    auto shape = logits.sizes().vec();
    shape.insert(shape.begin(), ranks);
    const auto values = all.view(shape).to(at::kCPU);
    for (int64_t i = 0; i < std::min(ranks, count - done); ++i) {
      try {
        file->add(done + i, values.select(0, i), of.task.validation_batch(done + i));
      } catch (const CheckpointError&) {
        failure = std::current_exception();
      }
    }
  }
  try {
    if (file && !failure) file->commit();
  } catch (const CheckpointError&) {
    failure = std::current_exception();
  }
  comm::share_failure<CheckpointError>(of.group, "Writing the logits", failure);
}

}  // namespace

Evaluation evaluate(const EvaluateOptions& options, const std::shared_ptr<comm::Group>& group) {
  auto program = program_of(options);
  check_logits(options.logits, *group);
  std::vector<std::optional<PassingFolder>> folders(program.data.size());
  EncodedTexts texts;
  const auto data = open_all(program, folders, texts, *group);
  const auto sizes = model_config(program, data);
  const auto kind = naming_texts(texts, [&] {
    const auto task = task_of(program, data, *sizes);
    if (options.seq == 0 && task != TrainingTask::classes)
      program.seq = length_for(data.train, program.seq);
    return task;
  });
  auto tokens = naming_texts(texts, [&] {
    return comm::agree<DataError>(*group, "Opening the data",
                                  [&] { return task_data(program, data, *sizes, 0, 1); });
  });
  folders.clear();  // all ranks have opened their files
  Config config;
  config.stage = options.stage;
  config.bf16 = options.bf16;
  LoadedModel loaded(*sizes, program, config, group);
  const auto task = make_task(loaded.model(), std::move(tokens), program, 0, 1, 1);

  const Evaluated evaluated{.task = *task,
                            .model = loaded.model().module(),
                            .group = *group,
                            .autocast = config.autocast_dtype(),
                            .rows = options.micro_batch};
  const bool classifies = kind == TrainingTask::classes;
  std::optional<LogitsFile> logits;
  if (!options.logits.empty()) {
    comm::agree_on_rank_zero<CheckpointError>(*group, "Making the file of logits", [&] {
      logits.emplace(options.logits, *task, classifies, *sizes);
    });
  }
  const auto mean = mean_loss(evaluated, [&] {
    return options.stop && comm::any_rank(*group, options.stop(), "a signal");
  });
  if (!mean) return {.task = kind, .stopped = true};
  if (mean->weight == 0) {
    throw DataError(
        fmt::format("No token of {} is to be predicted. Give more text, or data with answers.",
                    names_of(program)));
  }
  if (!std::isfinite(mean->loss)) {
    throw DataError(fmt::format("The loss on {} is {}: the weights of {} are not finite.",
                                names_of(program), mean->loss, options.from));
  }
  Evaluation result{.task = kind, .loss = mean->loss, .correct = mean->correct.value_or(0)};
  // A language model's weight counts sequences, if all batches weigh the same.
  result.predicted = classifies            ? task->validation_batches()
                     : task->step_weight() ? task->validation_tokens()
                                           : std::llround(mean->weight);
  if (!options.logits.empty()) write_logits(evaluated, logits);
  return result;
}

}  // namespace zero::train
