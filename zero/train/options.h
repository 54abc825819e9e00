// What a training run is asked to do: the `train` section of a configuration file, or the program's
// options.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/optim/schedule.h"

namespace zero::train {

/// "constant", "linear" or "cosine". Throws ConfigError for another name, with the nearest.
optim::Decay decay_from(std::string_view name);

/// Everything but the engine's own configuration (zero::Config), which a run takes beside this.
struct Options {
  std::string model = "gpt2";  ///< a name (gpt2, gpt2-nano, ...) or a Hugging Face config.json
  std::string data{};          ///< text, tokens, or a folder made by `zero data prepare`
  /// A file, of which all validates, or a folder, of which the validation split does; of the same
  /// tokens as `data`. Empty: the validation split of `data`.
  std::string val_data{};
  std::string out = "run";
  int64_t vocab_size = 0;  ///< 0: the model's own; for gpt2-nano that of the data
  int64_t seq = 256;
  int64_t steps = 1000;
  double min_lr = -1;   ///< below 0: a tenth of the peak rate
  int64_t warmup = -1;  ///< steps; below 0: a tenth of the steps, at most 200
  std::string schedule = "cosine";
  double dropout = -1;  ///< below 0: the model's own
  int64_t seed = 1;
  int64_t threads = 0;          ///< of each rank; 0: what OMP_NUM_THREADS or the machine says
  int64_t eval_every = 0;       ///< steps; 0: at the end only
  int64_t eval_tokens = 65536;  ///< of a validation, over all ranks; 0: no validation
  int64_t log_every = 1;
  int64_t save_every = 0;       ///< steps between checkpoints that --resume continues; 0: none
  int64_t sample_tokens = 200;  ///< tokens generated at the end; 0: none
  std::string prompt = "\n";
  double temperature = 0.8;
  int64_t top_k = 0;  ///< the sample takes only the likeliest so many tokens; 0: any
  bool overwrite = false;
  bool resume = false;

  /// Throws ConfigError naming the option, its value and what it should be.
  void validate() const;
  bool operator==(const Options&) const = default;
};

/// Calls `field(key, member, help)` for each option in order: the one list from which the program's
/// options, the keys of the configuration file and the log are made. `options` may be const.
template <class Options, class Field>
void for_each_field(Options& options, const Field& field) {
  field("model", options.model,
        "Sizes of the model, whose initial weights are random: gpt2, gpt2-medium, gpt2-large, "
        "gpt2-xl, gpt2-nano, or a Hugging Face config.json");
  field("data", options.data, "Text or token file, or a folder made by `zero data prepare`");
  field("val_data", options.val_data,
        "File to validate on, or folder with a validation split, if not the split of --data");
  field("out", options.out, "Folder of log.jsonl, model.safetensors and config.json");
  field("vocab_size", options.vocab_size,
        "Tokens of the model; 0: its own, for gpt2-nano those of the data");
  field("seq", options.seq, "Tokens of a sequence");
  field("steps", options.steps, "Updates of the weights");
  field("min_lr", options.min_lr, "Rate at the last step; below 0: a tenth of --lr");
  field("warmup", options.warmup,
        "Steps of linear warm-up; below 0: a tenth of --steps, at most 200");
  field("schedule", options.schedule, "Decay after the warm-up: constant, linear or cosine");
  field("dropout", options.dropout, "Probability; below 0: the model's own");
  field("seed", options.seed, "Of weights, order of the data and dropout");
  field("threads", options.threads,
        "Of each rank; 0: OMP_NUM_THREADS, or the cores shared by the ranks");
  field("eval_every", options.eval_every, "Steps between validations; 0: at the end only");
  field("eval_tokens", options.eval_tokens,
        "Tokens of a validation, spread evenly over its text; 0: no validation");
  field("log_every", options.log_every,
        "Steps between lines on the console (log.jsonl has every step)");
  field("save_every", options.save_every, "Steps between checkpoints for --resume; 0: none");
  field("sample_tokens", options.sample_tokens, "Tokens to generate at the end; 0: none");
  field("prompt", options.prompt, "What the sample continues");
  field("temperature", options.temperature, "Of the sample; 0: always the likeliest token");
  field("top_k", options.top_k, "The sample takes only the likeliest so many tokens; 0: any");
  field("overwrite", options.overwrite, "Replace an earlier run in --out");
  field("resume", options.resume, "Continue the run in --out from its last checkpoint");
}

/// Throws ConfigError for an option that was replaced by another, which it names.
[[noreturn]] void refuse_eval_batches();

/// Sets what the `train` section of a configuration file names. `json` is the whole file (comments
/// allowed; the section may be absent), `origin` its name. Throws ConfigError for an unknown key
/// (with the nearest) or a value of the wrong type.
void read_options(Options& options, std::string_view json, std::string_view origin);

/// The section as JSON text, which `read_options` reads back (inside {"train": ...}) to an equal
/// value.
std::string dump(const Options& options);

}  // namespace zero::train
