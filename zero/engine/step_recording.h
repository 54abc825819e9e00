// The schedule of a step that was recorded, and the distance at which units are gathered ahead.
//
// Note [One distance]
// A distance decides when gathers start beside reductions, so all ranks need the same. Each rank
// chooses one from its own recording, and all take the largest choice: a rank with longer sequences
// has more computation to hide gathers behind.
//
// Note [Measured speeds]
// Between hosts the speeds need not be given. The link's is measured when the engine is made
// (Group::measure_link), and that of computing in the second step that updates: its FLOPs in the
// time in which the rank did not wait for others. The first step also pays for what happens once.
// Such a speed is what computing and updates reach together, while other work goes on; so a
// distance is also chosen for twice that speed, and the longer one holds. Other speeds change when
// gathers start, and neither bits nor bytes.
#pragma once

#include <chrono>
#include <cstdint>
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

  /// Measures the link between hosts, if the configuration does not give its speed. Records one of
  /// the first steps, to choose the distance, if the speeds are known then. Collective.
  void start_first(const Flows& flows);
  /// Records the step that begins now; a recording under way is dropped.
  void start(const Flows& flows);
  void stop(const Flows& flows) { record_with(nullptr, flows); }
  /// A step has ended. The recording goes on if it has not updated. Collective if a distance is to
  /// be chosen.
  void end_step(bool updated, const Flows& flows);
  /// See SourceParts::touched.
  void touched() {
    if (!recorder_) return;
    if (!recorder_->begun()) begin_time();  // what came before, as a validation, was no step
    recorder_->touched();
  }
  /// Returns the last step that was recorded, or null.
  const paging::StepSchedule* schedule() const { return recorded_ ? &*recorded_ : nullptr; }

 private:
  void record_with(std::unique_ptr<StepRecorder> next, const Flows& flows);
  void begin_time();
  double computed_flops_per_second() const;
  void choose_prefetch(paging::Pager& pager);

  const EnginePlan& plan_;
  std::unique_ptr<StepRecorder> recorder_;  // while a step is recorded
  /// When the distance is chosen.
  enum class Choice : uint8_t {
    none,       // not any more, or never
    recorded,   // when a step has been recorded
    warmed_up,  // one step later
  };
  Choice choice_ = Choice::none;
  std::chrono::steady_clock::time_point began_;  // the step that is recorded
  double waited_before_ms_ = 0;
  std::optional<paging::StepSchedule> recorded_;
};

}  // namespace zero
