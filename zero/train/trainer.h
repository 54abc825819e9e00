// The training loop: a language model on tokens, with its states partitioned as the engine's
// configuration says.
//
//   zero::Settings settings{
//       .engine = {.stage = 3},
//       .program = {.model = "gpt2-nano", .data = "text.txt", .out = "run"}};
//   zero::train::Trainer trainer(settings, zero::init());
//   trainer.train();
//
// run.h has the parts of a run, task.h the task that is learnt, step_passes.h the passes of a step,
// and recovery.h the handling of numbers that are not finite.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "zero/train/measuring.h"
#include "zero/train/recovery.h"
#include "zero/train/run.h"
#include "zero/train/step_exchange.h"
#include "zero/train/step_passes.h"

namespace zero::train {

class Trainer {
 public:
  /// Opens the data and the output folder, builds the model, shards it, and continues an earlier
  /// run if the options say so. Settings that differ from the checkpoint's are reported; none is
  /// taken from there (`saved_settings` reads them). All ranks give equal arguments. On rank 0 the
  /// console, DIR/log.jsonl, the monitors of the configuration and `more` get reports. With
  /// `overwrite` an earlier run's log and checkpoints are removed once all checks have passed; its
  /// weights stay until new ones replace them. Collective. Throws ConfigError, DataError,
  /// CheckpointError, OutOfMemory, StoreError; a rank that stops because of another's failure
  /// throws an Error that is a comm::PeerFailure too.
  Trainer(const Settings& settings, std::shared_ptr<comm::Group> group,
          std::vector<std::unique_ptr<Monitor>> more = {});

  /// Trains to the last step, until SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches any rank, or until
  /// `stop_after` is over; then writes the weights. A signal also ends a validation or a sample
  /// under way. Returns the signal, or 0. Collective.
  int train();

  /// Makes one update of the weights over all micro-batches. Throws NotFinite if the loss is not
  /// finite. Nothing is updated then, except by `update_in_backward` before all ranks knew. The
  /// step is run again, watched, and the message names the first cause (Note [A step that is not
  /// finite] in recovery.cpp). Collective.
  StepReport train_step();
  /// Returns the mean loss over the same `eval_tokens` tokens every time, spread evenly over the
  /// validation text. It is equal for any number of ranks and any micro-batch (Note [Validation] in
  /// validation.h). Returns none if `train` was asked to stop meanwhile. Collective.
  std::optional<ValidationReport> validate();
  /// Generates `sample_tokens` from the prompt, fewer if `train` was asked to stop meanwhile, and
  /// reports them; as token numbers if the data does not say how to decode them. Collective.
  void sample();
  /// Writes DIR/model.safetensors (Hugging Face's names, the engine's dtype) and DIR/config.json,
  /// each whole or not at all; or the adapter, and with `lora.merge` the merged model. Collective.
  void save_weights();
  /// Writes DIR/checkpoint-STEP, then removes older ones. Collective. Throws CheckpointError.
  void save_checkpoint();

  int64_t step() const { return step_; }
  Engine& engine() { return *run_.engine; }
  LanguageModel& model() { return *run_.model; }

 private:
  /// Continues the run from its last checkpoint. Returns the step after it, or 1.
  int64_t resume();
  /// Tells the monitors about the run before its first step. Collective.
  void report_run();
  void set_rates(StepReport& report);
  /// Exchanges losses with the other ranks, and judges the mean. Throws NotFinite. Collective.
  Recovery::Verdict exchange(StepReport& report);
  StepResult update(bool leave_out);
  void report_validation();
  /// Calls `body` with the weights for evaluation in force (Engine::optimizer_eval). Collective.
  template <class Body>
  void evaluating(const Body& body);
  void write_model();
  /// Returns whether a signal asks `train` to stop, the same on all ranks, and remembers it.
  /// Collective.
  bool agree_to_stop();
  /// Loads the copy in memory that the run begins with. Returns false if it is damaged: then it is
  /// dropped, and the run goes on from another one. Collective.
  bool resume_from_memory();
  /// Gives the data, the recovery and the trainer the state of `point`, which was saved after
  /// `step`. Throws DataError for other data.
  void go_on_from(ResumePoint point, int64_t step);
  /// Begins to write DIR/checkpoint-STEP, or a copy in memory. Collective. Throws CheckpointError.
  void begin_save(bool background, bool in_memory = false);
  /// Begins a copy in memory if one is due and no save is under way. Collective.
  void copy_if_due();
  /// Completes a save that was begun, reports it, and removes older checkpoints. Collective.
  /// Throws CheckpointError.
  void end_save();
  /// Calls `save`, which begins a copy `in_memory` or ends the save that is under way. Where that
  /// throws a CheckpointError the run goes on, and monitors are told.
  template <class Save>
  void try_save(const Save& save, bool in_memory = false);
  /// Returns the signal that has come, SIGALRM where `stop_after` is over, or 0.
  int asked_to_stop() const;
  int finish(double seconds);

  Run run_;
  int64_t step_ = 0;                  ///< updates done
  std::vector<std::string> changes_;  ///< settings that changed since the checkpoint
  RunFiles earlier_;                  ///< on rank 0: what runs have written to the folder before
  std::vector<std::string> damaged_;  // newer checkpoints that were skipped
  StepPasses passes_;
  StepExchange exchange_;
  Recovery recovery_;
  int64_t first_step_;
  Measuring measuring_;
  int stop_signal_ = 0;
  std::optional<ValidationReport> validation_;  ///< the last one
  bool save_over_ = false;
  bool copy_due_ = false;
  bool copy_failed_ = false;        ///< the last one
  std::jthread remover_;            ///< removes files of checkpoints that are none any more
  std::optional<SaveReport> save_;  ///< the save that `end_save` would complete
  std::chrono::steady_clock::time_point save_begin_;
  std::chrono::steady_clock::time_point train_begin_;
  std::optional<double> stop_after_;            ///< seconds from then on
  const class StopSignals* signals_ = nullptr;  ///< while `train` runs
};

}  // namespace zero::train
