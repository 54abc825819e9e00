// The parts of a training run. They are made from its settings, and shared by the code that trains,
// recovers and samples.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/config/settings.h"
#include "zero/data/dataset.h"
#include "zero/engine/engine.h"
#include "zero/engine/memory_copies.h"
#include "zero/models/language/language_model.h"
#include "zero/models/lora/lora.h"
#include "zero/optim/schedule.h"
#include "zero/train/options.h"
#include "zero/train/reports.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"
#include "zero/train/task.h"

namespace zero::train {

/// The optimizer of a run whose configuration names none: AdamW as GPT-2's successors are trained.
inline constexpr AdamW kDefaultOptimizer{
    .lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
inline constexpr int64_t kDefaultMicroBatch = 8;

/// Returns whether a schedule can cycle the optimizer's momentum: Engine::set_betas.
bool has_betas(const Optimizer& optimizer);

/// Checks the settings that need neither data nor ranks nor folders: the model, its schedule, and
/// options that must go together. Throws ConfigError.
void check_options(const Settings& settings);

/// Makes the checks that one process can make before ranks are started: options, data, output
/// folder, the memory budget. Changes nothing, except that it makes the output folder once all else
/// is well. Throws ConfigError, DataError or OutOfMemory.
void check_run(const Settings& settings, int ranks);

/// The parts of a run. They are made in this order; all ranks give equal arguments. Collective.
/// Throws as Trainer's constructor does.
struct Run {
  Run(const Settings& given, std::shared_ptr<comm::Group> ranks,
      std::vector<std::unique_ptr<Monitor>> more);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  int64_t micro_batches() const { return engine->config().gradient_accumulation_steps; }
  int64_t micro_batch_size() const { return *options.micro_batch_size; }
  int64_t tokens_per_step() const {
    return group->size() * micro_batches() * micro_batch_size() * options.seq;
  }
  /// Describes the run for its monitors.
  RunInfo describe(int64_t first_step, const std::vector<std::string>& changes) const;

  RunSettings settings;
  const Options& options;
  std::shared_ptr<comm::Group> group;
  RunFolder folder;
  Reports reports;
  Dataset data;
  optim::Schedule schedule;
  std::string weights_report;  ///< the weights that the run has begun with; empty: random ones
  std::string tiers_reason;    ///< which states a memory budget puts on disk, and why
  std::shared_ptr<ActivationStore> activations;  ///< null: activations stay where they are
  std::unique_ptr<LanguageModel> model;
  std::optional<Lora> lora;                 ///< the model's adapter
  std::unique_ptr<MemoryCopies> copies;     ///< train.memory_copies; null: none
  std::optional<MemoryCopies::Found> copy;  ///< the one that the run goes on from
  std::vector<std::string> copy_faults;     ///< of copies in memory that are not used
  std::optional<Engine> engine;
  std::unique_ptr<Task> task;
  /// The rate of each parameter group over the schedule's. It is not 1 for parameters that Muon
  /// or Apollo leaves to AdamW.
  std::vector<double> rate_factors;
};

}  // namespace zero::train
