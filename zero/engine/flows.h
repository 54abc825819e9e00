// The table, and the three flows over it.
#pragma once

#include <memory>

#include "zero/engine/backward_pass.h"
#include "zero/engine/engine_plan.h"
#include "zero/engine/factored_states.h"
#include "zero/engine/gather.h"
#include "zero/engine/hyper_parameters.h"
#include "zero/engine/memory_budget.h"
#include "zero/engine/parameter_writes.h"
#include "zero/engine/reduce.h"
#include "zero/engine/state_table.h"
#include "zero/engine/step_progress.h"
#include "zero/engine/step_recording.h"
#include "zero/engine/update.h"
#include "zero/engine/update_schedule.h"

namespace zero {

class Flows {
 public:
  /// Makes the flows and moves the model's values in. If that fails, any use of a parameter whose
  /// bytes are lost throws an error that says so. All arguments outlive this. Collective.
  Flows(EnginePlan& plan, StepProgress& progress, const HyperParameters& hyper_parameters,
        MemoryBudget& memory, StepRecording& recording);

  StateTable& table() const { return *table_; }
  FactoredStates& factored() const { return *factored_; }
  GatherFlow& gather() const { return *gather_; }
  ReduceFlow& reduce() const { return *reduce_; }
  UpdateFlow& update() const { return *update_; }
  UpdateSchedule& schedule() const { return *schedule_; }
  ParameterWrites& writes() const { return *writes_; }
  BackwardPass& pass() const { return *pass_; }

 private:
  void make_table(const EnginePlan& plan);
  void make_gather(const EnginePlan& plan, const MemoryBudget& memory, StepRecording& recording);
  void move_in(const EnginePlan& plan);
  void move_parameters(const EnginePlan& plan);
  void start(EnginePlan& plan, MemoryBudget& memory);

  DeviceCopier copier_;
  std::unique_ptr<StateTable> table_;
  std::unique_ptr<FactoredStates> factored_;
  std::unique_ptr<GatherFlow> gather_;
  std::unique_ptr<ReduceFlow> reduce_;
  std::unique_ptr<UpdateFlow> update_;
  std::unique_ptr<ParameterWrites> writes_;
  std::unique_ptr<BackwardPass> pass_;        // between the model's hooks and `reduce_`
  std::unique_ptr<UpdateSchedule> schedule_;  // ends first: its updates use the above
};

}  // namespace zero
