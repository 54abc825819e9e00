// When updates run: the one place that knows.
//
// Note [When updates run]
// now              in `step`, unit by unit
// in backward      as soon as a unit's gradient is reduced, beside the rest of the pass
// in next forward  after `step`, up to the unit's first use
// delayed          beside the whole of the next step, which uses weights one update old
// Whatever is not done now is done by one thread (UpdateQueue), and new parameters that others
// still use the old of stay hidden (StateTable::use_new_parameters). Results are those of updates
// in `step`, bit for bit, but for delayed ones, which depend on the delay alone.
//
// Of an update in two passes (two_passes.h) the first one, which leaves the weights alone, runs in
// backward or in `step`, and only the second one later.
//
// Note [Update in backward]
// Without clipping a unit can be updated as soon as its gradient is reduced. A thread does so
// beside the rest of backward, above all where states are on disk: then their bytes pass while the
// other units' gradients are computed. The weights are still needed by this rank's backward, if
// they are shared, and by its peers', so new ones stay hidden until `step`, as with a delayed
// update.
//
// A few slices wait for their turn. Of units that may be updated in the next forward pass as many
// more as find room in memory that activations have left: backward frees that as it goes, and the
// next forward pass, which needs it again, completes the updates as it goes. What was held at most
// before the first of them is the measure; the peak so far would grow by what comes on top of them.
//
// In fp16 a step may overflow, which is known when all gradients are there, and updates of other
// units have been made. They are taken back: where states lie on disk they have two copies there,
// of which the update reads one and writes the other, and `step` turns to the other or does not. In
// memory two copies would take more than the gradients that wait without this schedule, so there it
// is refused.
//
// Note [Update in forward]
// Nobody needs the new parameters of a unit before the next forward pass gathers it. Where they lie
// on disk each rank reads its own slice for that, so it can wait for its own update then, and no
// rank needs to tell another: the disk works on the optimizer's states while the first layers
// compute already, with clipping too. What the next backward pass will change (gradients on disk,
// learning rates) is read by then: it begins by completing the updates of units that were not used.
// Units in memory are updated within `step`.
//
// Note [Delayed update]
// Step i's update may run while step i + 1 computes (ZeRO-Offload, 2101.06840, section 5.2): then
// step i + 1 uses the weights that the gradients of step i - 1 gave. The update leaves the new
// parameters hidden, in memory of their own (which held those of before: it does not read the
// model's) or in a second copy on disk, and reads gradients that were set apart; the next step
// waits for it before it changes anything. Reading, writing or saving states completes an update
// under way first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/engine/late_updates.h"
#include "zero/engine/reduce.h"
#include "zero/engine/state_table.h"
#include "zero/engine/update.h"
#include "zero/engine/update_queue.h"
#include "zero/engine/update_timing.h"
#include "zero/partition/layout.h"

namespace zero {

/// What a schedule needs of the engine whose updates it runs.
class UpdateHost {
 public:
  virtual ~UpdateHost() = default;
  /// Returns the factor that makes a sum over ranks and micro-batches of now the mean.
  virtual double mean_scale() const = 0;
  /// Throws where the user has written a parameter that an update under way replaces.
  virtual void refuse_writes(std::string_view when) = 0;
  /// Shows the owned parameters of a unit to the other ranks.
  virtual void publish(int64_t unit) = 0;
};

class UpdateSchedule final : public LateUpdates {
 public:
  /// All outlive this.
  UpdateSchedule(const partition::Layout& layout, StateTable& table, UpdateFlow& update,
                 ReduceFlow& reduce, size_t parameters, const UpdateTiming& timing,
                 UpdateHost& host);

  /// Some updates run beside what follows: whoever starts them publishes the units.
  bool beside() const { return queue_ != nullptr; }

  /// A backward pass begins: completes what it must not meet. `holds`: its forward passes are still
  /// to come.
  void begin_pass(bool holds);
  /// The pass has run: completes the updates of units that it has not used either.
  void end_pass();
  /// In backward: the sum of a unit is here, for its update.
  void take_up(int64_t unit, at::Tensor sum);
  /// `step`: updates all units (but those that backward has taken up) from the sums of now, after
  /// `steps` updates so far: here, or beside what follows.
  void start(double scale, int64_t steps);
  /// In backward: takes the updates of this step back, which an overflow leaves out.
  void take_back_updates();
  void complete(int64_t unit) override;
  bool try_complete(int64_t unit) override;
  /// Completes what `start` has left, and shows its parameters on this rank. Nobody reads them
  /// meanwhile.
  void finish();
  /// Something is left, and the parameters of now are those of before it.
  bool delayed() const { return delayed_ && left(); }
  /// Something is left that `finish` may complete at any time.
  bool left() const;

  /// By unit: something of it is left.
  const std::vector<uint8_t>& left_units() const { return left_; }

  /// Blocks until no update runs. Throws what one threw.
  void wait();
  /// Drops what is left of updates, of which none runs: all states are about to be replaced.
  void discard();

 private:
  void update_now(double scale);
  void pass_first(const std::vector<int64_t>& batch, double scale);
  void finish(int64_t unit);
  bool reads_old(int64_t unit) const;
  // Counts the time as waiting for an update, and for the disk, where there is one.
  template <class Wait>
  void counted(const Wait& wait);

  const partition::Layout& layout_;
  StateTable& table_;
  UpdateFlow& update_;
  ReduceFlow& reduce_;
  UpdateTiming timing_;
  UpdateHost& host_;
  std::vector<uint8_t> present_;      // of the update under way
  std::vector<uint8_t> all_present_;  // of an update in backward: a whole unit's gradients
  std::vector<uint8_t> left_;         // by unit: `step` has left its update under way
  bool delayed_ = false;              // as a delayed update
  // Bytes of the host allocator, the most before the first update in backward.
  std::optional<int64_t> held_before_updates_;
  // Null where every update is done here. The last member: it ends first.
  std::unique_ptr<UpdateQueue> queue_;
};

}  // namespace zero
