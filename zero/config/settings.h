// The settings of a configuration file with DeepSpeed's keys: those of the engine, of the model
// that a program builds, and of the program (`zero train`).
//
//   const auto settings = zero::Settings::load("ds_config.json", group->size());
//   zero::tile_linears(*model, settings.model.tile_elements.value_or(0));
//   zero::Engine engine(model, settings.engine, group);
//
// Note [Table of settings]
// Each setting is one row of the table that begins in zero/config/fields.cpp. A row has its key,
// its member, its range and the sentence that explains it. Reading, dumping and checking files, the
// options of `zero train` and the tables of docs/config.md all use the rows. A new setting is a
// member and a row.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/config/config.h"
#include "zero/config/findings.h"
#include "zero/optim/base_format.h"
#include "zero/optim/schedule.h"

namespace zero {

/// Recomputation in backward: DeepSpeed's `activation_checkpointing` section.
struct ActivationCheckpointing {
  /// How often a block is recomputed: the first of every `every` blocks is.
  std::optional<int64_t> every{};
  /// The blocks' inputs live in one buffer that every step uses again.
  bool contiguous_memory_optimization = false;
  /// The inputs live in files, in a private folder inside `nvme_path`.
  bool nvme = false;
  std::string nvme_path{};
  bool operator==(const ActivationCheckpointing&) const = default;
};

/// The changes that a program makes to the model before the engine takes it.
struct ModelSettings {
  ActivationCheckpointing activation_checkpointing{};
  /// Linear layers whose weight has more elements are split into tiles of at most as many, each a
  /// parameter of its own (memory-centric tiling): tile_linears().
  std::optional<int64_t> tile_elements{};
  bool operator==(const ModelSettings&) const = default;
};

/// A monitor that writes files: DeepSpeed's sections `tensorboard` and `csv_monitor`.
struct MonitorSettings {
  bool enabled = false;
  std::string output_path{};  ///< empty: the run's folder
  std::string job_name = "DeepSpeedJobName";
  bool operator==(const MonitorSettings&) const = default;
};

/// A table of how long collectives take: DeepSpeed's section `comms_logger`.
struct CommsLogger {
  bool enabled = false;
  bool verbose = false;                 ///< reports each call too
  bool prof_all = true;                 ///< every collective; else those of `prof_ops`
  bool debug = false;                   ///< `verbose` names the purpose of a call
  std::vector<std::string> prof_ops{};  ///< "all_gather", "reduce_scatter_tensor", ...
  bool operator==(const CommsLogger&) const = default;
};

/// Counts a step's FLOPs and reports them: DeepSpeed's section `flops_profiler`.
struct FlopsProfilerSettings {
  bool enabled = false;
  int64_t profile_step = 1;  ///< steps of the run before the one that is counted
  int64_t module_depth = -1;
  int64_t top_modules = 1;
  bool detailed = true;
  std::string output_file{};  ///< empty: the console
  double recompute_fwd_factor = 0;
  bool operator==(const FlopsProfilerSettings&) const = default;
};

/// The device on which a run's model lies. `any` is CUDA if there is such a device, else the CPU.
enum class TrainingDevice : uint8_t { cpu, cuda, any };

/// Says what a run learns to predict. `any`: as the model's head says; of one that predicts next
/// tokens, supervised if the data have marks (NAME.marks.bin).
enum class TrainingTask : uint8_t { any, language, supervised, masked, classes };

/// Low-rank adapters of the model's linear layers: the section `train.lora`.
struct LoraOptions {
  std::optional<int64_t> rank{};  ///< none: there are no adapters
  double alpha = 8;
  double dropout = 0;
  bool rslora = false;
  bool dora = false;
  std::string targets{};          ///< NamePattern::parse reads it; empty: as peft chooses
  std::string modules_to_save{};  ///< names, separated by commas
  std::string adapter{};          ///< a peft folder, whose adapter the run begins with
  /// The format of the frozen weights of linear layers (QLoRA).
  BaseFormat quantize_base = BaseFormat::as_they_are;
  bool merge = false;  ///< the run also writes its model with the adapter merged
  bool on() const { return rank || !adapter.empty(); }
  bool operator==(const LoraOptions&) const = default;
};

/// The settings that only `zero train` uses: the section `train`, the micro-batch, and monitors.
struct ProgramSettings {
  std::string model = "gpt2";  ///< a name (gpt2, gpt2-nano, ...) or a Hugging Face config.json
  /// A Hugging Face folder whose weights the run begins with, in place of `model`. Empty: random.
  std::string from{};
  LoraOptions lora{};
  std::string freeze{};  ///< parameters that are not trained: NamePattern::parse reads it
  TrainingTask task = TrainingTask::any;
  std::optional<int64_t> mask_token{};  ///< of TrainingTask::masked; else the tokenizer's
  /// Tokens see those of their own document alone, as the marks of the data say.
  bool document_attention = false;
  /// Text, tokens, or a folder made by `zero data prepare`. Several are a mixture.
  std::vector<std::string> data{};
  /// How often each of `data` is sampled; they need not add up to 1. Empty: each sequence of all
  /// data once in an epoch.
  std::vector<double> data_weights{};
  /// A file, all of which is for validation, or a folder, of which the validation split is. It must
  /// have the same tokens as `data`. Empty: the validation split of `data`.
  std::string val_data{};
  std::string out = "run";
  std::optional<int64_t> vocab_size{};  ///< else the model's own; for gpt2-nano that of the data
  int64_t seq = 256;
  /// The sequences that a rank passes at a time.
  std::optional<int64_t> micro_batch_size{};
  int64_t steps = 1000;
  std::optional<double> min_lr{};   ///< else a tenth of the peak rate
  std::optional<int64_t> warmup{};  ///< steps; else a tenth of the steps, at most 200
  optim::Decay schedule = optim::Decay::cosine;
  std::optional<int64_t> decay_steps{};  ///< for Decay::wsd; else a tenth of the steps
  std::optional<double> dropout{};       ///< else the model's own
  int64_t seed = 1;
  std::optional<int64_t> threads{};  ///< a rank's; else as the machine suggests
  TrainingDevice device = TrainingDevice::cpu;
  /// The hosts' memory carries what ranks on devices send each other (comm::ThroughHost).
  bool through_host = false;
  std::optional<int64_t> eval_every{};  ///< steps; else at the end only
  int64_t eval_tokens = 65536;          ///< a validation's, over all ranks; 0: no validation
  int64_t log_every = 1;
  bool group_norms = false;  ///< gradient norms of the parameter groups, in log.jsonl
  /// Checks each operator's output; otherwise only those of a step that failed, which is run again.
  bool detect_anomaly = false;
  bool deterministic = false;  ///< operators give the same bits each time (DeterministicOperators)
  /// The steps between comparisons of parameters that several ranks should hold equally; 0: none.
  int64_t check_replicas = 100;
  bool skip_spikes = false;  ///< a loss far above those before is left out of the updates
  /// Such a step is left out, and training goes on from a checkpoint that is this many steps older,
  /// with the data that follow.
  std::optional<int64_t> rewind_spikes{};
  std::optional<int64_t> save_every{};        ///< steps between checkpoints that --resume continues
  bool save_in_background = true;             ///< beside the steps that follow
  int64_t save_staging = int64_t{256} << 20;  ///< bytes: SaveOptions::staging_bytes
  std::string stop_after{};  ///< a time since the start of training, as "3h50m"; empty: none
  /// Steps between copies in the memory of the hosts (MemoryCopies).
  std::optional<int64_t> memory_copies{};
  int64_t keep_last = 1;                ///< how many of the newest checkpoints stay
  std::optional<int64_t> keep_every{};  ///< checkpoints of steps that are multiples of it stay too
  bool keep_best = false;               ///< that of the lowest validation loss stays too
  int64_t sample_tokens = 200;          ///< tokens generated at the end
  std::string prompt = "\n";
  double temperature = 0.8;
  std::optional<int64_t> top_k{};  ///< the sample takes only this many likeliest tokens
  /// Weight decay acts on parameters of fewer than two dimensions too.
  bool decay_all = false;
  bool overwrite = false;
  bool resume = false;
  std::string resume_from{};  ///< a step or a folder; empty: the newest checkpoint that is sound
  std::string
      profile{};  ///< file to which a step's spans go (zero/engine/step_profile.h), or empty
  int64_t profile_step = 3;           ///< the step, counted from 1 in each start of the run
  bool wall_clock_breakdown = false;  ///< each step's time by phase, and its waits
  CommsLogger comms_logger{};
  MonitorSettings tensorboard{};
  MonitorSettings csv_monitor{};
  FlopsProfilerSettings flops_profiler{};

  /// Throws ConfigError naming the key, its value and what it must be.
  void validate() const;
  bool operator==(const ProgramSettings&) const = default;
};

struct Settings {
  Config engine{};
  ModelSettings model{};
  ProgramSettings program{};
  /// The schedule of the file's `scheduler` section, which replaces `program.schedule`. The run
  /// decides the values that it leaves open: optim::complete.
  std::optional<optim::Schedule> scheduler{};

  /// Reads a JSON file, as Config::load does.
  static Settings load(const std::string& path, int world_size, const ReadOptions& options = {});
  /// Reads the same from text; `origin` names it in errors.
  static Settings parse(std::string_view text, int world_size,
                        std::string_view origin = "configuration", const ReadOptions& options = {});
  /// Returns what becomes of each key of the text: which act, which have no effect and why, and
  /// which are refused, for which `parse` throws. Throws ConfigError for text that is no JSON.
  static std::vector<Finding> check(std::string_view text, int world_size,
                                    std::string_view origin = "configuration",
                                    const ReadOptions& options = {});
  /// Returns the settings in force as JSON text, which `parse` reads back to an equal value.
  std::string dump() const;
  /// Throws ConfigError if a value is out of range or two do not go together. For the program it
  /// checks ranges only; ProgramSettings::validate finds what a run lacks.
  void validate() const;
  bool operator==(const Settings&) const = default;
};

}  // namespace zero
