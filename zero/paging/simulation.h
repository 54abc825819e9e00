// Simulates the timeline of a step: when its operators, gathers, reductions and updates run at
// given speeds, and how much of their time is not hidden behind computing. This tells how far ahead
// units should be gathered. The simulation uses numbers alone: no tensors, no clocks.
//
// Note [Simulated timeline]
// A recorded step (StepSchedule) says which units its operators use, how much they compute, and
// after which of them a unit is reduced. Its plan (plan.h) says before which operator a gather may
// start. Each piece of work is a task of one resource, and a resource does its tasks one after the
// other, in the order in which the engine hands them out. A task begins when its resource is free
// and the tasks that it needs are done:
//
//   read, up    of a slice that is on a disk or on the host: a read may go as far ahead of its
//               gather as `read_ahead_bytes` allow; a copy to the device begins with the gather
//   gather      when the operators before its `start` are done: the frame that it takes was theirs
//   operator    its units are there; and where reductions start in every backward pass, of two
//               under way the older one is done, since the next bucket to fill is its own
//   reduction   the operator is done after which it starts; or the last one (ReducesIn)
//   down        copies of reduced gradients to the host, when they are reduced
//   update      unit by unit, when all gradients are there; on the device or on the host, with the
//               reads before it, and the writes, copies and all-gathers of new parameters behind
//               it. Beside other work (UpdatesIn) it is of the resource `host`: it begins with the
//               step before which its gradients came, or when the next unit is reduced; its
//               parameters come into force when the step ends. A unit that is updated as it is
//               gathered (`updated_in_gather`) is so before its first gather in the step, with the
//               gradients of the step before
//
// On CPUs the processors that compute carry the messages too. Each message then lengthens the next
// operators by `Speeds::link_work` of its time, less what it carried while they waited.
//
// The simulation simplifies. An operator lasts as long as its FLOPs say. Messages have no latency.
// The host that hands out the work takes no time and waits for no copy. Nothing else uses a
// resource. A gather waits for operators even if a frame is free before them, as a device's first
// frames are. The engine's results do not depend on times: a schedule only decides what is under
// way at the same time.
//
// Note [Exposed time]
// If the resource `compute` is idle it waits for something. The task that it does next began when
// another ended, which began when one before it had ended, and so on back. That chain tells whose
// time the gap is. So the step lasts as long as `compute` is busy plus the exposed time of all
// others.
//
// Note [Prefetch distance]
// Gathering ahead takes memory for the units that are on their way or waiting. At some distance
// gathers are hidden, or are bound by their link alone; a longer distance gains nothing. The pager
// gathers as early as its budget and `prefetch_bytes` allow, so `prefetch_bytes` is the distance.
// `choose_prefetch` tries distances of whole units, ordinary ones and the largest, and takes the
// least with which the step is within one per cent of the best. The distance changes when a gather
// starts, not which gathers there are: traffic and results are the same.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "zero/paging/plan.h"
#include "zero/paging/trace.h"

namespace zero::paging {

/// The speeds of the resources, in units a second. At 0 the work of a resource takes no time.
struct Speeds {
  double compute = 0;    ///< FLOPs
  double link = 0;       ///< bytes that a rank (between hosts: a host) sends
  double pcie = 0;       ///< bytes between device and host, each way
  double disk = 0;       ///< bytes, reads and writes together
  double update = 0;     ///< bytes of gradients, parameters and states that an update passes over
  double link_work = 0;  ///< the part of computing that is lost while the link is busy, 0 to 1
};

enum class Resource : uint8_t {
  compute,
  link,
  up,    ///< from the host to the device
  down,  ///< from the device to the host
  disk,
  host,  ///< updates of states that are not on the device
};
inline constexpr size_t kResources = 6;
std::string_view name(Resource resource);

enum class Work : uint8_t { forward, backward, gather, reduce, update, copy, read, write };
std::string_view name(Work work);

/// The bytes of one unit, on one rank.
struct UnitCosts {
  int64_t bytes = 0;             ///< the whole unit, in memory
  int64_t gather = 0;            ///< bytes over the link, for each gather
  int64_t gather_up = 0;         ///< bytes of its slice from the host, for each gather
  int64_t gather_read = 0;       ///< bytes of its slice from the disk, for each gather
  int64_t reduce = 0;            ///< bytes over the link, for each reduction
  int64_t reduce_down = 0;       ///< bytes of the sum to the host, for a step's first reduction
  int64_t reduce_down_next = 0;  ///< the same for each further reduction
  int64_t reduce_write = 0;      ///< bytes of the sum to the disk, for each reduction
  int64_t reduce_read = 0;       ///< bytes of the sum from the disk, for each further reduction
  int64_t reduce_at_end = 0;     ///< bytes over the link, when all passes have ended
  int64_t update_read = 0;       ///< bytes of states from the disk
  int64_t update_down = 0;       ///< bytes of parameters to the host, before the update
  int64_t update = 0;            ///< bytes that the update passes over
  int64_t update_write = 0;      ///< bytes of states to the disk
  int64_t update_up = 0;         ///< bytes of new parameters to the device
  int64_t publish = 0;           ///< bytes of new parameters over the link
  bool trainable = true;         ///< the unit is reduced and updated
  bool updated_on_host = false;
  bool updated_in_gather = false;  ///< the update waits until the next step gathers the unit
  bool operator==(const UnitCosts&) const = default;
};

/// Says when gradients are reduced.
enum class ReducesIn : uint8_t {
  every_pass,  ///< stages 2 and 3, from buckets
  last_pass,   ///< stages 0 and 1 between hosts and on a device, from arrays that stay
  step         ///< stages 0 and 1 on one host's CPU: once the last pass has ended
};

/// Says when updates run: Note [When updates run] in engine/update_schedule.h.
enum class UpdatesIn : uint8_t {
  step,      ///< when all gradients are there
  backward,  ///< each when its unit is reduced
  next_step  ///< beside the whole of the next step
};

/// One step, as it was recorded.
struct StepSchedule {
  /// The reduction of `unit` starts after operator `after`.
  struct Reduction {
    int64_t unit = 0;
    size_t after = 0;
    bool operator==(const Reduction&) const = default;
  };
  Trace trace{};
  /// The FLOPs of each operator of the trace. They include those of the operators outside the trace
  /// that follow it.
  std::vector<double> flops{};
  /// Tells, by operator, whether it runs in a backward pass.
  std::vector<uint8_t> backward{};
  /// The reductions in order, in all backward passes of the step.
  std::vector<Reduction> reductions{};
  /// The costs of each unit.
  std::vector<UnitCosts> units{};
  /// Stage 3: units are gathered for their operators. Otherwise they are present all the time.
  bool gathers = true;
  ReducesIn reduces_in = ReducesIn::every_pass;
  UpdatesIn updates_in = UpdatesIn::step;
  int64_t budget_bytes = 0;      ///< bytes of gathered units: PlanOptions
  int64_t prefetch_bytes = 0;    ///< bytes of those that are ahead of their use: PlanOptions
  int64_t read_ahead_bytes = 0;  ///< bytes of slices ahead of their gather; a larger slice is read
                                 ///< ahead alone

  std::vector<int64_t> unit_bytes() const;
  /// Returns the plan of the trace for this budget. Throws nothing; without `gathers` the plan has
  /// no gathers.
  Plan plan() const;
};

/// Leaves out the first use of the unit, which is a look-up by rows (Note [Look-ups by rows] in
/// engine/row_look_ups.h). An operator that uses other units, too, stays.
void leave_out_first_use(StepSchedule& schedule, int64_t unit);

struct SimulatedTask {
  static constexpr size_t kNone = static_cast<size_t>(-1);

  Resource resource{};
  Work work{};
  int64_t unit = 0;  ///< the unit of the task; of an operator the first one that it uses
  int64_t bytes = 0;
  double begin = 0;  ///< seconds from the beginning of the step
  double end = 0;
  /// The task whose end it waited for; kNone if it began with the step.
  size_t waited_for = kNone;
};

struct SimulatedStep {
  std::vector<SimulatedTask> tasks{};  ///< in the order in which they are handed out
  double seconds = 0;
  std::array<double, kResources> busy{};
  /// Note [Exposed time]; 0 for `compute`. seconds == busy[compute] + the sum of `exposed`.
  std::array<double, kResources> exposed{};
  /// The bytes that the resource moves; for `compute` and `host`, the bytes that updates pass
  /// over.
  std::array<int64_t, kResources> bytes{};
  /// The most bytes of gathered units.
  int64_t live_bytes = 0;

  double exposed_seconds() const;
};

/// Runs the step with the plan of its own budget and prefetch.
SimulatedStep simulate(const StepSchedule& schedule, const Speeds& speeds);

struct PrefetchChoice {
  int64_t prefetch_bytes = 0;
  double seconds = 0;            ///< the time of the step with this choice
  double best_seconds = 0;       ///< its time with the best distance within the limit
  double on_demand_seconds = 0;  ///< its time without gathering ahead
  int64_t live_bytes = 0;        ///< the most bytes of gathered units with this choice
};

/// Returns the least distance that is as good as any up to `schedule.prefetch_bytes`, within a part
/// `tolerance` of the step: Note [Prefetch distance].
PrefetchChoice choose_prefetch(StepSchedule schedule, const Speeds& speeds,
                               double tolerance = 0.01);

}  // namespace zero::paging
