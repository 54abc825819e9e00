// The training loop: a language model on tokens, with its states partitioned as the engine's
// configuration says.
//
//   zero::Settings settings{
//       .engine = {.stage = 3},
//       .program = {.model = "gpt2-nano", .data = "text.txt", .out = "run"}};
//   zero::train::Trainer trainer(settings, zero::init());
//   trainer.train();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "zero/comm/group.h"
#include "zero/config/settings.h"
#include "zero/data/dataset.h"
#include "zero/data/token_loader.h"
#include "zero/engine/engine.h"
#include "zero/engine/flops_profiler.h"
#include "zero/engine/step_profile.h"
#include "zero/engine/step_watch.h"
#include "zero/models/language/language_model.h"
#include "zero/optim/schedule.h"
#include "zero/train/accounts.h"
#include "zero/train/loss_spikes.h"
#include "zero/train/monitor.h"
#include "zero/train/options.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"
#include "zero/train/stragglers.h"
#include "zero/train/validation.h"

namespace zero::train {

/// The optimizer of a run whose configuration names none: AdamW as GPT-2's successors are trained.
inline constexpr AdamW kDefaultOptimizer{
    .lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
inline constexpr int64_t kDefaultMicroBatch = 8;

/// Whether a schedule can cycle the optimizer's momentum: Engine::set_betas.
bool has_betas(const Optimizer& optimizer);

/// Checks what one process can check before ranks are started: options, data, output folder, the
/// memory budget. Changes nothing, but makes the output folder once all else is well. Throws
/// ConfigError, DataError or OutOfMemory.
void check_run(const Settings& settings, int ranks);

class Trainer {
 public:
  /// Opens the data and the output folder, builds the model, shards it, and continues an earlier
  /// run where the options say so (which settings differ from the checkpoint's is reported; none is
  /// taken from there, but see `saved_settings`). All ranks give equal arguments. On rank 0 the
  /// console, DIR/log.jsonl, the monitors of the configuration and `more` get reports. With
  /// `overwrite` an earlier run's log and checkpoints go once nothing refuses this one; its weights
  /// stay until new ones replace them. Collective. Throws ConfigError, DataError, CheckpointError,
  /// OutOfMemory, StoreError; a rank that stops because of another's failure throws an Error that
  /// is a comm::PeerFailure too.
  Trainer(const Settings& settings, std::shared_ptr<comm::Group> group,
          std::vector<std::unique_ptr<Monitor>> more = {});

  /// Trains to the last step or until SIGINT, SIGTERM or SIGHUP reaches any rank; then writes the
  /// weights. Such a signal also ends a validation or a sample under way. Returns the signal, or 0.
  /// Collective.
  int train();

  /// One update of the weights over all micro-batches. Throws NotFinite where the loss is not
  /// finite: then nothing was updated, but for what `update_in_backward` did before all ranks knew.
  /// The step is run again, watched, and the message names what came first (Note [A step that is
  /// not finite] in trainer.cpp). Collective.
  StepReport train_step();
  /// The mean loss over the same `eval_tokens` tokens every time, spread evenly over the validation
  /// text: equal for any number of ranks and any micro-batch (Note [Validation] in validation.h).
  /// None where `train` was asked to stop meanwhile. Collective.
  std::optional<ValidationReport> validate();
  /// Generates `sample_tokens` from the prompt, fewer where `train` was asked to stop meanwhile,
  /// and reports them; token numbers where the data does not say how to decode them. Collective.
  void sample();
  /// Writes DIR/model.safetensors (Hugging Face's names, the engine's dtype) and
  /// DIR/config.json, whole or not at all. Collective.
  void save_weights();
  /// Writes DIR/checkpoint-STEP, then removes older ones. Collective.
  void save_checkpoint();

  int64_t step() const { return step_; }
  Engine& engine() { return engine_.value(); }
  LanguageModel& model() { return *model_; }

 private:
  /// Numbers that the ranks exchange once a step, before the update.
  struct Exchange {
    float mean_loss = 0;
    int stop_signal = 0;
    std::vector<std::string> notices{};
    bool leaves_out = false;              ///< the step, for its loss
    std::optional<int64_t> rewinds_to{};  ///< the checkpoint of that step, for its loss
  };
  /// On the model's device.
  at::Tensor on_device(const at::Tensor& tokens) const;
  TokenLoader::Batch next_batch();
  /// Forward and backward of a step's micro-batches, whose losses go to `losses_`.
  void pass_micro_batches();
  template <class Pass>
  auto explained(const Pass& pass) const;
  /// What made a loss or gradient of step `step` infinite or NaN, for an error or a report: the
  /// same on every rank. Collective.
  std::string find_anomaly(int64_t step);
  /// Throws NotFinite with `what`, and with what `find_anomaly` says, on every rank. Collective.
  [[noreturn]] void fail_not_finite(const std::string& what, const std::string& advice);
  /// Measures what a rank's matrix products reach where all ranks' run, for `flops_profiler`.
  /// Collective.
  void measure_products();
  /// Counts this rank's operators, where the step is the one of `flops_profiler`.
  std::unique_ptr<FlopsProfiler> profiler_of(int64_t step) const;
  FlopsReport flops_of(const StepReport& report, const FlopsProfiler& profiler) const;
  void seed_dropout(int64_t step) const;
  /// The losses of sequences [first, first + rows) of the validation, and of the other ranks', in
  /// rank order; of the last one where there are not so many.
  std::vector<float> validate_pass(int64_t first, int64_t rows);
  void report_validation();
  /// Begins to measure what the options ask for.
  void start_measuring();
  /// Writes `profile_`, and says so. Collective.
  void write_profile();
  /// Whether a signal asks `train` to stop, for all ranks alike; remembers it.
  bool agree_to_stop();
  Exchange exchange(const std::vector<float>& losses, double lr);
  /// Of a loss that is finite: whether it is a spike. The same on every rank.
  void watch_loss(Exchange& exchange, double lr);
  /// The step of the checkpoint that a spike in the step to come leads back to, if there is one old
  /// enough. Throws Error where it has led there too often. Collective.
  std::optional<int64_t> rewind_target();
  /// Note [Going back] in trainer.cpp. Collective.
  RewindReport rewind(int64_t step);
  /// The record of the checkpoint of its step, which makes that whole, or replaces its record.
  void write_record(const Progress& progress);
  /// Throws Error, on every rank, where ranks do not hold the same of a parameter. Collective.
  void check_replicas();
  void report(const std::function<void(Monitor&)>& what);
  void report_run();
  RunInfo describe() const;
  int64_t tokens_per_step() const;
  void resume();
  int finish(double seconds);

  RunSettings settings_;
  Options options_;
  std::shared_ptr<comm::Group> group_;
  RunFolder folder_;
  std::vector<std::unique_ptr<Monitor>> monitors_;  ///< empty on ranks other than 0
  std::exception_ptr monitor_failure_;              ///< shared at the next exchange
  Dataset data_;
  std::shared_ptr<ActivationStore> activations_;  ///< null: they stay where they are
  std::unique_ptr<LanguageModel> model_;
  std::optional<Engine> engine_;
  std::optional<TokenLoader> train_loader_;
  std::optional<Validation> validation_;
  std::optional<StepTraffic> traffic_;
  optim::Schedule schedule_;
  std::vector<double> rate_factors_;  ///< of groups whose rate is not the schedule's (Muon's AdamW)
  LoaderState step_data_;             ///< where the step's micro-batches begin
  std::optional<StepWatch> watch_;    ///< with `detect_anomaly`, or while a step is run again
  bool named_ = false;                ///< a skipped step's cause was looked for
  int64_t last_update_ = 0;           ///< the last step that was not skipped
  std::vector<float> losses_;         ///< of this rank's micro-batches in the step
  std::vector<float> all_losses_;     ///< of all ranks, by micro-batch and then by rank
  Stragglers stragglers_;
  RankTime last_time_;                ///< this rank's in the step before
  std::vector<RankTime> rank_times_;  ///< of all ranks
  LossSpikes spikes_;
  Rewinds rewinds_;
  double last_norm_ = 0;
  /// Of one step, with `profile`: until the next has ended, and with it what that one had left
  /// under way.
  std::optional<StepProfile> profile_;
  std::string tiers_reason_;
  double product_speed_ = 0;  ///< FLOP/s; 0: not measured
  at::Tensor exchange_mine_, exchange_all_;
  int64_t step_ = 0;  ///< updates done
  int64_t first_step_ = 1;
  std::vector<std::string> changes_;  ///< of settings, since the checkpoint
  int stop_signal_ = 0;
  const class StopSignals* signals_ = nullptr;  ///< while `train` runs
};

}  // namespace zero::train
