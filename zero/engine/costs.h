// The costs of a step on one rank: memory by state and tier, messages by collective and link, bytes
// between device, host and disk. All of it is computed from numbers: a layout, the units' plans and
// a grid of ranks, for one rank or thousands, without an Engine, a Group or a tensor. The engine's
// formulas, the simulated timeline and planners of runs call the same functions.
//
// Note [Costs]
// Each unit has its bytes (paging::UnitCosts for a device, a host, a disk and a link; UnitMessages
// for collectives), and a step has this many of each:
//   gathers      stage 3: two for each of k passes, one for forward and one for backward;
//                stages 1 and 2: one, of the updated parameters; stage 0: none
//   reductions   stages 2 and 3: one for each pass; stages 0 and 1: one
//   updates      one, in which an optimizer of two sweeps (two_sweeps.h) reads its states twice
// k is the number of micro-batches, or one where all of them pass one layer before the next.
// Formulas of single collectives are in partition/link_bytes.h.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "zero/config/config.h"
#include "zero/engine/look_ups.h"
#include "zero/engine/model_shape.h"
#include "zero/engine/sweep_batches.h"
#include "zero/engine/traffic_formula.h"
#include "zero/engine/unit_plan.h"
#include "zero/engine/update_timing.h"
#include "zero/paging/simulation.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"
#include "zero/partition/rank_grid.h"
#include "zero/store/tier.h"

namespace zero {

/// A planned step: all that its costs depend on. `layout` and `units` outlive it.
struct PlannedStep {
  const partition::Layout& layout;
  const std::vector<UnitPlan>& units;
  partition::RankGrid grid;
  partition::Sharding sharded;
  UpdateTiming timing;
  /// Passes of the step, each of which gathers and reduces.
  int64_t passes = 1;
  /// Each of several hosts keeps all parameters: Note [Kept on a host] in
  /// window_units.cpp.
  bool kept_on_hosts = false;
  /// The rounding errors of a quantised sum are added to the next one.
  bool feedback = false;
  /// Stage 3: operators read units where they lie, so that a gather sends nothing.
  bool in_place = false;
  /// The sums of rows of gradients, by weight.
  std::vector<RowMessages> look_ups{};
  /// The rows of weights that are looked up without gathering them, by weight.
  std::vector<RowMessages> rows{};
  /// The exchanges of updates in two sweeps.
  std::vector<SweepBatch> sweep_batches{};
  /// By parameter, the rank that has its factored states: factored_owners.
  std::vector<int> factored_owners{};
  /// By unit, the bytes of the factored states that this rank has.
  std::vector<int64_t> factored_bytes{};
};

/// Returns the step of `units`, which plan_units has made of the same model, configuration and
/// ranks. On a device parameters are gathered by copying (`in_place` is false).
PlannedStep planned_step(const partition::Layout& layout, const std::vector<UnitPlan>& units,
                         const ModelShape& model, const Config& config, const PlannedRanks& ranks);

/// Sets the messages of a look-up in each rank's passes, or in the last one in a tied weight, if
/// the step suits: `look_ups` if the gradient of the weight may leave by rows or in tiles, and
/// `rows` if its rows may be looked up without it. All ranks' rows count as different, and as
/// spread evenly over their owners.
void plan_look_up(PlannedStep& step, const PlannedLookUp& look_up);

/// Returns the bytes of this rank's states on one tier, the device or the host, with padding. The
/// ledger shows the same, byte for byte.
partition::LayoutMemory planned_memory(const PlannedStep& step, Tier tier);
/// Returns the bytes of gradients, parameters and states that a step's updates on the host pass
/// over.
int64_t host_update_bytes(const PlannedStep& step);
/// Returns the bytes of this rank's states on its disk: whole pages, twice if an array has two
/// copies.
int64_t disk_bytes(const PlannedStep& step);
/// Returns the bytes of memory that updates of states on disk take, with so many buffers.
int64_t disk_update_memory(const PlannedStep& step, int64_t buffer_count);

/// One message of a unit, as this rank sends it.
struct MessageBytes {
  int64_t sent = 0;    ///< bytes to all other ranks
  int64_t leaves = 0;  ///< bytes of this rank that leave its host
};

/// The messages of one unit. Reductions of the first pass of a step come before those of later
/// ones.
struct UnitMessages {
  /// All-gather of the parameters over the ranks that shard, and over those of one host.
  MessageBytes gather;
  MessageBytes gather_in_host;
  /// Reduce-scatter of the gradients over the ranks that shard; at stage 0 the all-reduce.
  std::array<MessageBytes, 2> reduce;
  /// The sum of a slice over replicas: its reduce-scatter, and the all-gather that follows.
  std::array<MessageBytes, 2> reduce_over_replicas;
  std::array<MessageBytes, 2> gather_over_replicas;
  /// The sums of rows of the gradient, and the rows that are looked up: those of a step.
  MessageBytes look_ups;
  MessageBytes rows;
  /// Their count, where they are in the place of `reduce` and `gather`.
  int64_t look_ups_replace = 0;
  int64_t rows_replace = 0;

  /// Return the message of the unit in a pass: of all of it, or of the rows in its place.
  MessageBytes gather_in_pass() const;
  MessageBytes reduce_in_pass() const;
};
UnitMessages unit_messages(const PlannedStep& step, int64_t unit);

/// Returns the message of an array of `gathered` bytes that ranks gather between two sweeps.
MessageBytes sweep_message(const PlannedStep& step, int64_t gathered);

/// Returns, by unit, the bytes that the simulated timeline moves. Between hosts a link is a host's,
/// and its ranks share it; on one host each rank has a link.
std::vector<paging::UnitCosts> unit_costs(const PlannedStep& step);

/// Returns the bytes of a step that updates, or (`updated` false) of one that leaves its update
/// out.
TrafficFormula planned_traffic(const PlannedStep& step, bool updated = true);

}  // namespace zero
