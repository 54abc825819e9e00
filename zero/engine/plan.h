// What is decided before anything is allocated: the layout of the model's units, and for each unit
// a row of the table.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/config/config.h"
#include "zero/engine/model.h"
#include "zero/engine/placement.h"
#include "zero/engine/tiers.h"
#include "zero/engine/unit_plan.h"
#include "zero/engine/update_timing.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"

namespace zero {

/// The parameters of `model` in units, over the ranks of `placement`.
partition::Layout lay_out(const Model& model, const Config& config, const Placement& placement);

/// The dtype that the engine gives a parameter.
at::ScalarType dtype_in_engine(const Model& model, int64_t parameter, const Config& config);

/// Which states are sharded. One rank has nobody to shard with: every state is whole on it; what is
/// elsewhere comes and goes all the same.
partition::Placement sharded_states(const Config& config, int ranks);

/// A row for each unit, for the rank of `placement.shards`. Throws ConfigError where master weights
/// cannot be split.
std::vector<UnitPlan> plan_units(const partition::Layout& layout, const Model& model,
                                 const Config& config, const Placement& placement,
                                 const UpdateTiming& timing);

/// Sizes by which tiers are chosen, without activations.
StepSize step_size(const Model& model, int ranks);

}  // namespace zero
