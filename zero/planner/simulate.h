// The time of a step on a described cluster: a traced step as the tasks of the simulated timeline.
//
// Note [Times on a cluster]
// paging/simulation.h runs a step's tasks; here each task already has its time, in nanoseconds, and
// all speeds are 1e9. Operators last as Note [Efficiency] says, messages as hardware.h's
// `Collective`, and the bytes of units are those of engine/costs.h. All ranks do the same, so one
// stands for all, and the time that this takes does not depend on their number. Further
// micro-batches add what the third one adds to the second.
#pragma once

#include <array>
#include <cstdint>

#include "zero/config/config.h"
#include "zero/paging/simulation.h"
#include "zero/planner/hardware.h"
#include "zero/planner/trace.h"

namespace zero::plan {

/// The seconds of a step by what they are spent on. `seconds` is the sum of the others.
struct StepTime {
  double seconds = 0;
  double compute = 0;  ///< operators
  double gather = 0;   ///< parameters that operators wait for
  double reduce = 0;   ///< gradients that are reduced when nothing else is left to do
  double offload = 0;  ///< copies between device and host
  double update = 0;   ///< of the optimizer
  double disk = 0;
};

/// Returns the seconds of an operator on a device, of parameters in `dtype`.
double operator_seconds(const TracedOperator& op, const Device& device, at::ScalarType dtype);

/// Returns the time of a step of `config` on `cluster`. `trace` is of one micro-batch. Without
/// `split` only `seconds` are computed, which takes a sixth of the time.
StepTime simulate(const Trace& trace, const Config& config, const Cluster& cluster,
                  bool split = true);

}  // namespace zero::plan
