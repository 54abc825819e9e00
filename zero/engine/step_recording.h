// The schedule of a step that was recorded, and the distance at which units are gathered ahead.
//
// Note [One distance]
// A distance decides when gathers start beside reductions, so all ranks need the same. Each rank
// chooses one from its own recording, and all take the largest choice: a rank with longer sequences
// has more computation to hide gathers behind.
#pragma once

#include <memory>
#include <optional>

#include "zero/engine/engine_plan.h"
#include "zero/engine/step_recorder.h"
#include "zero/paging/simulation.h"

namespace zero {

class Flows;

class StepRecording {
 public:
  /// `plan` outlives this.
  explicit StepRecording(const EnginePlan& plan) : plan_(plan) {}

  /// Records the first step, to choose the distance, if the configuration gives speeds for that.
  void start_first(const Flows& flows);
  /// Records the step that begins now; a recording under way is dropped.
  void start(const Flows& flows);
  void stop(const Flows& flows) { record_with(nullptr, flows); }
  /// A step has ended. The recording goes on if it has not updated. Collective if a distance is to
  /// be chosen.
  void end_step(bool updated, const Flows& flows);
  /// See SourceParts::touched.
  void touched() const {
    if (recorder_) recorder_->touched();
  }
  /// Returns the last step that was recorded, or null.
  const paging::StepSchedule* schedule() const { return recorded_ ? &*recorded_ : nullptr; }

 private:
  void record_with(std::unique_ptr<StepRecorder> next, const Flows& flows);
  void choose_prefetch(paging::Pager& pager);

  const EnginePlan& plan_;
  std::unique_ptr<StepRecorder> recorder_;  // while a step is recorded
  bool chooses_prefetch_ = false;           // when it has been
  std::optional<paging::StepSchedule> recorded_;
};

}  // namespace zero
