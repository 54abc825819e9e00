// When updates run, as the configuration says it: Note [When updates run] in update_schedule.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "zero/config/config.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/formulas.h"
#include "zero/partition/rank_grid.h"

namespace zero {

struct UpdateTiming {
  /// The first delayed update comes after this many updates. Empty: no update is delayed.
  std::optional<int64_t> delayed_after;
  bool in_backward = false;
  /// Units whose parameters are on disk are updated in the next forward pass.
  bool in_next_forward = false;
  /// Units in memory, too: their slices cross between hosts in gathers, and nobody else reads them.
  bool memory_in_next_forward = false;

  /// Updates in backward can be taken back, since an overflow of the step is known only after them.
  bool keeps_old_states = false;

  /// `grid` is that of the ranks, with the shard groups of `config`.
  static UpdateTiming of(const Config& config, partition::Sharding sharded,
                         const partition::RankGrid& grid);
  /// Returns whether parameters are still used while new ones are made.
  bool keeps_old_parameters() const { return delayed_after.has_value() || in_backward; }
  /// Returns whether the update of a unit may be pending until the next forward pass uses the unit.
  bool may_stay_pending(const UnitPlan& plan) const {
    return (in_next_forward && plan.parameters_at == Tier::disk) || stays_in_memory(plan);
  }
  /// Returns whether a unit in memory may be pending so: the thread that gathers it updates it.
  bool stays_in_memory(const UnitPlan& plan) const;
  /// Returns whether some updates run beside other work.
  bool any_beside(const std::vector<UnitPlan>& units) const {
    return keeps_old_parameters() || std::ranges::any_of(units, [&](const UnitPlan& plan) {
             return in_next_forward && plan.parameters_at == Tier::disk;
           });
  }
};

}  // namespace zero
