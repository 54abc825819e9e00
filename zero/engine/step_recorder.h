// Records one step of training for the simulated timeline (Note [Simulated timeline] in
// paging/simulation.h).
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "zero/engine/gradient_reduction.h"
#include "zero/paging/pager.h"
#include "zero/paging/simulation.h"

namespace zero {

/// While one lives, counts what the operators that the thread that made it calls compute
/// (operator_cost.h), in its backward passes too, wherever autograd runs them: each for the
/// operator of the pager's trace that was the last one when it ended. What runs before a step's
/// first use of a unit counts for none.
class StepRecorder final : public ReductionObserver {
 public:
  /// `pager` outlives this.
  explicit StepRecorder(const paging::Pager& pager);
  /// On another thread it leaves the first one's callback, which then counts nothing.
  ~StepRecorder() override;
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// An operator on this thread uses a unit of the pager: it may be one of autograd's threads.
  void touched();
  /// The reduction of `unit` starts now.
  void reduction_starts(int64_t unit) override;
  /// Forgets what was recorded: a step begins.
  void restart();
  /// FLOPs, passes and reductions of the step that was recorded, by the operators of
  /// `schedule.trace`.
  void write(paging::StepSchedule& schedule) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace zero
