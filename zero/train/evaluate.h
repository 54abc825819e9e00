// Measures a model of a folder on data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/config/settings.h"

namespace zero::train {

struct EvaluateOptions {
  std::string from{};     ///< a Hugging Face folder, or one of a peft adapter that names its model
  std::string adapter{};  ///< a peft folder, or empty
  /// The format of the weights beneath the adapter: as it was trained.
  BaseFormat quantize_base = BaseFormat::as_they_are;
  /// Tokens, a folder of `zero data prepare` (its validation split), or a text or JSON lines
  /// (.jsonl), which are encoded with the tokenizer.json of `from`. Several are measured as one,
  /// each of their sequences once; they have the same tokens, and each at least one sequence.
  std::vector<std::string> data{};
  TrainingTask task = TrainingTask::any;
  std::optional<int64_t> mask_token{};
  bool document_attention = false;  ///< ProgramSettings::document_attention
  /// Tokens in a sequence. 0: the model's context, at most 1024, or the only text where that is
  /// shorter.
  int64_t seq = 0;
  int64_t tokens = 0;       ///< at most so many, evenly from the data; 0: all
  int64_t micro_batch = 8;  ///< sequences that a rank passes together
  int stage = 0;            ///< 3: each rank holds its part of the weights
  bool bf16 = false;
  std::string logits{};          ///< a safetensors file to write, which is not there; or empty
  std::function<bool()> stop{};  ///< asked between batches: true ends the evaluation
};

struct Evaluation {
  TrainingTask task = TrainingTask::language;
  double loss = 0;        ///< mean over what is predicted, in nats
  int64_t predicted = 0;  ///< tokens, or texts of a classification
  int64_t correct = 0;    ///< texts of a classification
  bool stopped = false;   ///< `stop` has ended it, and there are no figures
};

/// Passes the data through the model, each sequence or text by itself in its result. The result is
/// that of every rank, and does not depend on their number. Collective. Throws ConfigError,
/// DataError and CheckpointError.
///
/// With `logits` rank 0 writes them in fp32, with one sequence of each rank in memory: of a
/// classification "logits" (texts, classes) and "labels" (texts); of the others "tokens" and
/// "targets" (sequences, T) and "logits.N" (T, V) of each sequence.
Evaluation evaluate(const EvaluateOptions& options, const std::shared_ptr<comm::Group>& group);

}  // namespace zero::train
