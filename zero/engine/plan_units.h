// The functions that make the plan, before anything is allocated: the layout of the model's units,
// and for each unit a row of the table. EnginePlan (engine_plan.h) keeps their results.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/config/config.h"
#include "zero/engine/form.h"
#include "zero/engine/model_shape.h"
#include "zero/engine/unit_plan.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"
#include "zero/partition/rank_grid.h"

namespace zero {

/// Returns the grid of ranks that a configuration makes of so many hosts.
partition::RankGrid grid_of(const Config& config, int64_t hosts, int64_t ranks_a_host);

/// Lays the parameters of `model` out in units, over the ranks of a shard group of `grid`. Throws
/// ConfigError for a trainable parameter in fp16 whose gradients would not be scaled.
partition::Layout lay_out(const ModelShape& model, const Config& config,
                          const partition::RankGrid& grid);

/// Returns the dtype that the engine gives a parameter.
at::ScalarType dtype_in_engine(const ParameterShape& parameter, const Config& config);

/// Returns which states are sharded over as many ranks. With one rank the stage counts as 0, unless
/// states are offloaded or updated in backward: they come and go by the stage's ways.
partition::Sharding sharded_states(const Config& config, int64_t ranks);

/// Makes a row for each unit of a layout that lay_out has made, for the rank that `ranks` names.
/// Throws ConfigError if master weights cannot be split, or gradients not be sent as
/// communication_data_type says. Talks to nobody.
std::vector<UnitPlan> plan_units(const partition::Layout& layout, const ModelShape& model,
                                 const Config& config, const PlannedRanks& ranks);

}  // namespace zero
