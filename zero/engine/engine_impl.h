// The parts of an Engine, in the order in which they are made; the files that implement it share
// them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/base/owner_process.h"
#include "zero/engine/backward_pass.h"
#include "zero/engine/costs.h"
#include "zero/engine/engine.h"
#include "zero/engine/factored_states.h"
#include "zero/engine/gather.h"
#include "zero/engine/model.h"
#include "zero/engine/on_device.h"
#include "zero/engine/placement.h"
#include "zero/engine/plan.h"
#include "zero/engine/reduce.h"
#include "zero/engine/shown_operators.h"
#include "zero/engine/state_source.h"
#include "zero/engine/state_table.h"
#include "zero/engine/step_recorder.h"
#include "zero/engine/update.h"
#include "zero/engine/update_schedule.h"
#include "zero/paging/simulation.h"
#include "zero/store/tier.h"

namespace zero {

struct Engine::Impl final : UpdateHost {
  Impl(NamedTensors tensors, const std::vector<ParameterGroup>& groups, Config config,
       std::shared_ptr<comm::Group> group);
  ~Impl() override;

  OwnerProcess owner{};
  std::unique_ptr<ShownOperators> shown{};  // on the thread that made this

  // Construction, after the plan: makes the table and the flows, and moves the model's values in.
  void seed_ranks() const;
  /// Throws ConfigError where an optimizer of two passes does not suit the rest.
  void check_passes() const;
  void make_table();
  void make_factored();
  void make_gather();
  void make_reduce();
  void make_updates();
  /// The model's values go to the table.
  void move_in();
  void start();

  /// All ranks. Arrays are gathered over `placement.shards`.
  comm::Group& group() const { return *placement.all; }
  /// Returns whether each of several hosts keeps all parameters: Note [Kept on a host] in
  /// window_units.cpp.
  bool kept_on_hosts() const {
    return config.hpz_partition_size > 1 && placement.shards->topology().hosts > 1;
  }
  bool trainable(int64_t unit) const { return plans[static_cast<size_t>(unit)].trainable; }
  /// The first parameter of a unit.
  int64_t first_of(int64_t unit) const { return layout.unit(unit).segments.front().parameter; }
  /// Throws ConfigError where there is none of that index.
  OptimizerGroup& parameter_group(size_t index) const;
  /// Returns the factor of the loss and its gradients: 1, or the loss scale over the micro-batches.
  double loss_factor() const;
  /// Returns the factor that makes a sum over ranks and micro-batches of scaled losses the mean.
  double mean_scale() const override;

  // The step (engine.cpp).
  /// Makes the pass, which tells the flows when it begins and ends.
  void make_pass();
  class Passes;  ///< what the engine does with backward passes
  /// Gradients of what `passes` runs go to the table.
  void collect(bool holds, const std::vector<int64_t>& shared, const std::function<void()>& passes);

  // Writes to parameters, the user's and the engine's (writes.cpp).
  /// Writes of the user since the last step go from gathered copies to the shards and master
  /// weights.
  void commit_writes();
  /// Throws Error, on every rank, naming a trainable parameter that a rank's user wrote since the
  /// last step; once for each write. Collective.
  void refuse_writes(std::string_view when) override;
  /// Gathered units are about to be out of date. Throws Error where one is pinned.
  void invalidate();
  /// Shows the owned elements of a unit to all, where this step changes them: of a frozen one
  /// where a user has written to it.
  void publish(int64_t unit) override;
  /// By unit, whether this rank's user has written to it since the last step.
  std::vector<uint8_t> written_units() const;
  /// Completes an update under way. Collective.
  void complete_update(std::string_view label);
  /// Runs `write`, which may change owned elements of `units`, while no rank reads the parameters,
  /// and shows these and what users have written to all. Collective.
  void change_parameters(
      std::string_view label, const std::function<void()>& write = [] {},
      const std::vector<int64_t>& units = {});
  /// By unit: `units`, and what any rank's user or an update under way has changed. Collective
  /// where parameters are replicated and updated in slices: then only these are gathered.
  std::vector<uint8_t> changed_units(std::string_view label, const std::vector<int64_t>& units);
  /// As `change_parameters`, where `write` replaces every state: whatever the step of now has made
  /// is dropped, complete or not. No update runs. Collective.
  void replace_states(std::string_view label, const std::function<void()>& write);
  /// Throws ConfigError where an update in backward uses gradients up.
  void check_gradients_kept() const;
  /// Throws Error where gradients are under way that a save would not have.
  void at_boundary(std::string_view what) const;
  /// Throws Error between backward and step where backward has updated some units and others not
  /// (update_in_backward): no state is that of a step then.
  void check_between_steps(std::string_view what) const;

  // Saving and loading (state_io.cpp), and states by parameter (state_access.cpp).
  StateParts parts();
  Progress progress() const;
  /// Opens a source, which checks it on every rank, and puts its states in place of the engine's.
  /// Collective.
  void load_states(std::string_view label,
                   const std::function<std::unique_ptr<StateSource>()>& open);
  /// Returns the full array of which every rank holds `owned`: gathers it where it is sharded.
  /// Collective.
  at::Tensor full(int64_t unit, const at::Tensor& owned);
  /// Writes the part that this rank owns of a parameter's full values (storage order).
  void write_owned(int64_t index, State state, const at::Tensor& values);

  // Formulas and the memory budget (formulas.cpp, budget.cpp).
  /// The step of this engine as costs.h takes it.
  PlannedStep planned() const;
  /// Bytes of this rank's states in the host's memory, if these are sharded: all but those on a
  /// disk or on a device of its own.
  partition::StateMemory states_in_memory(partition::Placement sharded) const;
  /// Returns whether gathered units get what a budget or a device leaves after the first step.
  bool spends_budget() const;
  /// Bytes of as many parameters; saturates.
  int64_t bytes_of(int64_t elements) const;
  /// Throws OutOfMemory where the states alone exceed it, or those on the device its cap.
  void check_budget() const;
  /// Throws OutOfMemory where the states exceed what the host has left for a rank and what the
  /// model holds of it now. All ranks have the same states and are given the same number.
  void check_memory(int64_t available) const;
  /// The cap of the device is in force from here on; of one with memory of its own, what it has.
  void limit_device();
  /// After the first step: what is left is for gathered units. Collective.
  void spend_budget();
  void spend_device();
  OutOfMemory explained(const c10::OutOfMemoryError& error) const;

  // The simulated timeline (prefetch.cpp).
  /// Records steps from now on with `next`; null ends that.
  void record_with(std::unique_ptr<StepRecorder> next);
  /// A step has ended that was to be recorded. Collective where a distance is to be chosen.
  void end_recording(bool updated);
  /// The pager gathers ahead as far as the recorded step gains by. Collective.
  void choose_prefetch();

  Config config;
  Model model;
  Placement placement;
  partition::Layout layout;
  UpdateTiming timing;
  std::vector<UnitPlan> plans;         // by unit
  std::unique_ptr<DeviceLimit> limit;  // null where nothing is known of a device
  HostLink link;
  std::unique_ptr<StateTable> table;
  std::unique_ptr<FactoredStates> factored;
  std::unique_ptr<GatherFlow> gather;
  std::unique_ptr<ReduceFlow> reduce;
  std::unique_ptr<BackwardPass> pass;  // between the model's hooks and `reduce`
  std::unique_ptr<UpdateFlow> update;
  std::unique_ptr<UpdateSchedule> schedule;  // ends first: its updates use all of the above
  int64_t micro_batches = 0;                 // since the last boundary
  bool passed = false;                       // since the last micro-batch was counted
  int scaled = 0;                            // passes under way that Engine::scale has scaled
  int64_t steps = 0;
  std::vector<uint8_t> frozen_written;  // by unit, by any rank's user, in this step
  std::optional<LossScale> loss_scale;  // where losses are scaled
  bool budget_spent = false;
  std::unique_ptr<StepRecorder> recorder;        // while a step is recorded
  bool chooses_prefetch = false;                 // when it has been
  std::optional<paging::StepSchedule> recorded;  // the last one
  BufferPolicy buffer_policy = BufferPolicy::per_rank;
};

}  // namespace zero
