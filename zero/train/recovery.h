// Handles losses and gradients that are not finite, spikes of the loss, and replicas that have
// diverged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/engine/step_watch.h"
#include "zero/train/loss_spikes.h"
#include "zero/train/run.h"
#include "zero/train/step_passes.h"

namespace zero::train {

class Recovery {
 public:
  /// How a step is judged for its loss.
  struct Verdict {
    std::string notice{};                 ///< a sentence about a spike; empty: none
    bool leaves_out = false;              ///< nothing is updated in the step
    std::optional<int64_t> rewinds_to{};  ///< the step of the checkpoint to go back to
  };

  /// `run` and `passes` outlive this.
  Recovery(Run& run, StepPasses& passes) : run_(run), passes_(passes) {}

  /// Watches every step from now on (`detect_anomaly`), and not only steps that are run again.
  void watch_steps();
  /// Returns what watches the passes of a step; null: nothing does.
  StepWatch* watch() { return watch_ ? &*watch_ : nullptr; }

  /// Judges a step's finite loss by those before it. The same on every rank. Collective where
  /// training may go back. Throws Error where that has not helped too often.
  Verdict judge(int64_t step, float loss, const std::vector<float>& all_losses, double lr);
  /// Remembers how the step ended.
  void end_step(int64_t step, bool updated, double grad_norm);

  /// Throws NotFinite on every rank: `what`, what made step `step` so, and `advice`. Collective.
  [[noreturn]] void fail_not_finite(int64_t step, const std::string& what,
                                    const std::string& advice);
  /// Returns what made the first step that was skipped so, where that is looked for: not of a
  /// dynamic loss scale, which finds its height by steps that overflow. Collective.
  std::string explain_skipped(int64_t step);

  /// Throws Error, on every rank, where ranks do not hold the same of a parameter before the update
  /// of step `step`. Collective.
  void check_replicas(int64_t step);

  /// Goes back from step `from` to the checkpoint of step `to`: Note [Going back] in recovery.cpp.
  /// Collective.
  RewindReport rewind(int64_t from, int64_t to);

  /// Returns what a checkpoint after `step` records.
  Progress progress(int64_t step) const;
  void restore(const Progress& progress);

 private:
  std::string find_anomaly(int64_t step);
  std::optional<int64_t> rewind_target(int64_t spike);

  Run& run_;
  StepPasses& passes_;
  std::optional<StepWatch> watch_;  ///< with `detect_anomaly`, or while a step is run again
  bool explained_ = false;          ///< the cause of a skipped step was looked for
  int64_t last_update_ = 0;         ///< the last step that was not skipped
  double last_norm_ = 0;
  LossSpikes spikes_;
  Rewinds rewinds_;
};

}  // namespace zero::train
