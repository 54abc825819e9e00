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
  /// The judgement of a step by its loss.
  struct Verdict {
    std::string notice{};                 ///< a sentence about a spike; empty: none
    bool leaves_out = false;              ///< the step updates nothing
    std::optional<int64_t> rewinds_to{};  ///< the step of the checkpoint to go back to
  };

  /// `run` and `passes` outlive this.
  Recovery(Run& run, StepPasses& passes) : run_(run), passes_(passes) {}

  /// Watches every step from now on (`detect_anomaly`), not only steps that are run again.
  void watch_steps();
  /// Returns the watch over the passes of a step; null if there is none.
  StepWatch* watch() { return watch_ ? &*watch_ : nullptr; }

  /// Judges a step's finite loss by those before it. The verdict is the same on every rank.
  /// Collective if training may go back. Throws Error if going back has failed to help too often.
  Verdict judge(int64_t step, float loss, const std::vector<float>& all_losses, double lr);
  /// Remembers how the step ended.
  void end_step(int64_t step, bool updated, double grad_norm);

  /// Throws NotFinite on every rank, with `what`, the cause in step `step`, and `advice`.
  /// Collective.
  [[noreturn]] void fail_not_finite(int64_t step, const std::string& what,
                                    const std::string& advice);
  /// Returns the cause of the first step that was skipped. It does not look for one with a dynamic
  /// loss scale, which finds its height by steps that overflow. Collective.
  std::string explain_skipped(int64_t step);

  /// Throws Error, on every rank, if ranks hold different values of a parameter that they should
  /// hold equally, before the update of step `step`. Collective.
  void check_replicas(int64_t step);

  /// Goes back from step `from` to the checkpoint of step `to`: Note [Going back] in recovery.cpp.
  /// Collective.
  RewindReport rewind(int64_t from, int64_t to);

  /// Returns the progress that a checkpoint after `step` records.
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
