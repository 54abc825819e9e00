// Runs updates at the time that UpdateTiming chose.
//
// Note [When updates run]
// now              in `step`, unit by unit
// in backward      as soon as a unit's gradient is reduced, beside the rest of the pass
// in next forward  after `step`, up to the unit's next gather
// delayed          beside the whole of the next step, which uses weights one update old
// One thread (UpdateQueue) runs all updates except those that run in `step` or in a gather. If
// other code still uses a unit's old parameters, the new ones wait in memory of their own until
// StateTable::use_new_parameters. Results are those of updates in `step`, bit for bit. Those of
// delayed updates depend on nothing but the delay.
//
// An update may have two sweeps (two_sweeps.h). The first sweep leaves the weights alone, and runs
// in backward or in `step`; only the second sweep runs later.
//
// Note [Update in backward]
// Without clipping, or if a step is clipped by the norm of the step before, a unit can be updated
// as soon as its gradient is reduced. A thread does so beside the rest of backward. This saves most
// if states are on a disk: their bytes pass while the other units' gradients are computed. If
// weights are shared, this rank's backward still needs the old ones, and so do the peers' passes.
// So new weights wait until `step`, as with a delayed update.
//
// As a rule only a few slices wait for their turn. More may wait if their units may be updated in
// the next forward pass: as many as fit into memory that activations have left. Backward frees that
// memory as it goes on. The next forward pass needs it again, and completes the updates as it goes
// on. Slices wait while the host allocator holds less than its peak before the first such update.
// That peak is taken once, since waiting slices would raise a later one.
//
// In fp16 a step may overflow. That is known when all gradients are there, and by then other units
// have been updated. Their updates are taken back. States on a disk have two copies for this: the
// update reads one and writes the other, and `step` switches to the other copy only without
// overflow. In memory two copies would take more than the gradients that wait without this
// schedule, so the configuration is refused there.
//
// Note [Update in forward]
// Nobody needs the new parameters of a unit before the next forward pass gathers it. If each rank
// brings its own slice to that gather, it can wait for its own update then, and no rank needs to
// tell another. The next backward pass changes the inputs of these updates (gradients on a disk,
// learning rates). So it first completes the updates of units that forward has not used. Whoever
// reads states by name, saves or loads them completes all before. UpdateTiming tells which units
// may wait:
// - Units whose parameters are on a disk. The disk moves the optimizer's states while the first
//   layers compute already, with clipping too. The queue's thread runs these updates.
// - Units in memory that are gathered between hosts. (Ranks of one host read slices in place, and
//   hpZ sends all after the update, so those are updated within `step`.) The first gather begins
//   when its own unit is updated, and the other updates run while the link is busy. The thread that
//   gathers a unit updates it first, with all of its processors (Pager calls `prepare`), so the
//   order is that of the gathers.
//
// The sum of a unit in memory lives until its update. Peak memory is what it is with updates in
// `step`: before forward gathers unit k it holds activations of the units before k and the sums
// from k on. When backward reduced unit k it held the same, and the bucket of k.
//
// Note [Delayed update]
// Step i's update may run while step i + 1 computes (ZeRO-Offload, 2101.06840, section 5.2): then
// step i + 1 uses the weights that the gradients of step i - 1 gave. The update writes the new
// parameters to memory of their own, which held the ones before, so it does not read the model's;
// if they are on a disk it writes a second copy. It reads gradients that were set apart. The next
// step waits for it before it changes anything. Reading or writing states completes an update under
// way first. A save does not: it waits until the update is computed, and keeps both the states
// after it and the parameters in force, so the run goes on as without the save, and a run that
// loads them goes on in the same way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "zero/engine/parameter_writes.h"
#include "zero/engine/pending_updates.h"
#include "zero/engine/reduce.h"
#include "zero/engine/step_progress.h"
#include "zero/engine/update.h"
#include "zero/engine/update_queue.h"

namespace zero {

class UpdateSchedule final : public PendingUpdates, public BackwardUpdates {
 public:
  /// The arguments outlive this.
  UpdateSchedule(const EnginePlan& plan, const StepProgress& progress, StateTable& table,
                 UpdateFlow& update, ReduceFlow& reduce, ParameterWrites& writes);

  /// Returns whether a thread runs the updates. Parameters may then come into force in a step that
  /// updates nothing: those of a delayed update.
  bool beside() const { return queue_ != nullptr; }

  /// A backward pass begins: completes updates that must not run beside it. With `layer_major` its
  /// forward passes are still to come.
  void begin_pass(bool layer_major);
  /// The pass has run: completes the updates of units that neither it nor forward has used.
  void end_pass();
  /// Takes the sum of a unit in backward, and updates the unit from it.
  void update_in_backward(int64_t unit, at::Tensor sum) override;
  /// Updates all units from the sums of this step, except those that backward has taken up. `step`
  /// calls it after `steps` updates so far. The updates run here, or later beside other work. Units
  /// are published in their order, each as soon as its own parameters are in force.
  void start(double scale, int64_t steps);
  /// Takes back the updates that backward has made in this step, because of an overflow.
  void take_back_updates();
  void complete_before_read(int64_t unit) override;
  bool try_complete(int64_t unit) override;
  /// Completes the pending updates, which `start` has left under way, and puts their parameters
  /// into force on this rank. Nobody may read them meanwhile.
  void finish();
  /// Returns whether delayed updates are pending, so that the current parameters are those before
  /// them.
  bool delayed() const { return delayed_ && pending(); }
  /// Does as `finish`, but the parameters of delayed updates, which are computed then, stay out of
  /// force. Throws Error as `finish` does.
  void settle();
  /// Takes the states of the table for those after delayed updates whose parameters are not in
  /// force: `StateTable::read_new` returns them.
  void resume_delayed();
  /// Returns whether updates are pending, which `finish` may complete at any time.
  bool pending() const;

  /// Returns by unit whether its update is pending.
  const std::vector<uint8_t>& pending_units() const { return pending_; }

  /// Blocks until no update runs. Throws the error of an update.
  void wait();
  /// Drops the pending updates, none of which runs: all states are about to be replaced.
  void discard();

 private:
  void update_now(double scale);
  void leave(int64_t unit, double scale);
  void run_left(int64_t unit);
  void sweep_first(size_t batch, double scale);
  // Completes the pending update of one unit, a delayed one too.
  void finish_unit(int64_t unit);
  void compute_delayed();
  bool may_read_now(int64_t unit) const;
  // Runs `wait`, and counts its time as waiting for an update, and for the disk if there is one.
  template <class Wait>
  void counted(const Wait& wait);

  const partition::Layout& layout_;
  StateTable& table_;
  UpdateFlow& update_;
  ReduceFlow& reduce_;
  const UpdateTiming& timing_;
  const StepProgress& progress_;
  ParameterWrites& writes_;
  std::vector<uint8_t> present_;      // the gradients of the update under way
  std::vector<uint8_t> all_present_;  // the gradients of an update in backward: a whole unit's
  std::vector<uint8_t> pending_;      // by unit: `step` has left its update to be completed
  // By unit, if there is no queue: the pending update, for the thread that completes it.
  std::vector<std::function<void()>> left_;
  mutable std::mutex left_mutex_;  // guards `left_`, and `pending_` if there is no queue
  bool delayed_ = false;           // the pending update is a delayed one
  // Bytes of the host allocator, the most before the first update in backward.
  std::optional<int64_t> held_before_updates_;
  // Null if every update runs in `start`. The last member: it ends first.
  std::unique_ptr<UpdateQueue> queue_;
};

}  // namespace zero
