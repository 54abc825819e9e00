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

/// While one lives, it counts the FLOPs of this thread's operators (operator_cost.h), also in its
/// backward passes, on whichever thread autograd runs them. It adds an operator's FLOPs to the
/// operator of the pager's trace that was the last one when the operator ended. It does not count
/// operators before a step's first use of a unit.
class StepRecorder final : public ReductionObserver {
 public:
  /// `pager` outlives this.
  explicit StepRecorder(const paging::Pager& pager);
  /// If it runs on another thread, the first thread keeps its callback, which then counts nothing.
  ~StepRecorder() override;
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Returns whether an operator of the step that the pager is in has used a unit.
  bool begun() const;
  /// Returns how many operators of the pager's trace are recorded so far, or fewer.
  size_t operators() const;
  /// An operator on this thread uses a unit of the pager. The thread may be one of autograd's.
  void touched();
  /// The reduction of `unit` starts now.
  void reduction_starts(int64_t unit) override;
  /// Forgets the recording: a step begins.
  void restart();
  /// Writes FLOPs, passes and reductions of the recorded step to `schedule`, by the operators of
  /// `schedule.trace`.
  void write(paging::StepSchedule& schedule) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace zero
