// Writes of the user to parameters, which go to the table when a step or a scope ends.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/gather.h"
#include "zero/engine/state_table.h"

namespace zero {

class ParameterWrites {
 public:
  /// The arguments outlive this.
  ParameterWrites(EnginePlan& plan, StateTable& table, GatherFlow& gather)
      : plan_(plan), table_(table), gather_(gather), frozen_written_(plan.units().size(), 0) {}

  /// Returns, by unit, whether this rank's user has written to it since the last step.
  std::vector<uint8_t> written_units() const;
  /// Copies writes since the last step from gathered units to the shards and master weights.
  void commit();
  /// Throws Error, on every rank, naming a trainable parameter that a rank's user wrote since the
  /// last step; once for each write. Collective.
  void refuse(std::string_view when);
  /// Drops gathered units, which are about to be out of date. Throws Error if one is pinned.
  void invalidate();
  /// Tells, in a step and by unit, whether a rank's user has written to a unit that is frozen and
  /// sharded.
  void set_frozen_written(std::vector<uint8_t> units) { frozen_written_ = std::move(units); }
  /// Shows the owned elements of a unit to all ranks if this step changes them. Those of a frozen
  /// unit change only if a user has written to it.
  void publish(int64_t unit) {
    if (plan_.trainable(unit) || frozen_written_[static_cast<size_t>(unit)] != 0)
      gather_.publish(unit);
  }

 private:
  EnginePlan& plan_;
  StateTable& table_;
  GatherFlow& gather_;
  std::vector<uint8_t> frozen_written_;
};

}  // namespace zero
