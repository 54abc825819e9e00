// The norms of a step's gradient, which are the same bits at every stage, and the agreement of the
// ranks that brings the norm of all gradients.
//
// Note [Norms]
// The norm of all gradients is the square root of a sum of squares, whose terms are added up in an
// order that depends neither on the stage nor on the places of sums: unit by unit, and in each unit
// one term for each of the N parts of its array (N: all ranks). Each rank computes the term of its
// own part of each unit (with replicas, a part of the slice that they share), and one all-gather
// gives all terms to all ranks. The norm of one parameter group is different: the elements that a
// group has in a part depend on N, so its squares are added up exactly (Note [Exact sums] in
// optim/exact_sum.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/gradient_presence.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/optim/optimizer.h"

namespace zero {

class ReduceFlow;

/// Computes this rank's terms.
class UnitNorms {
 public:
  UnitNorms(int64_t units, c10::Device device);
  /// Returns, by unit, the sum of squares of the part that this rank adds up, for those of `units`
  /// that some rank had a gradient for. On a device the host waits for them, once.
  std::vector<optim::SquaredNorm> of(const std::vector<int64_t>& units,
                                     const GradientPresence& presence,
                                     const GradientReduction& reduction) const;

 private:
  int64_t units_;
  at::Tensor on_device_;  // (units, 2); undefined on the CPU
};

/// All ranks know this before a step changes anything. One message of each rank carries all of it.
struct StepAgreement {
  double norm = 0;     ///< the norm of the sums over ranks and micro-batches, not of their mean
  bool finite = true;  ///< no gradient of any rank is infinite or NaN
  /// By unit: 1 if it is frozen, parameters are sharded, and some rank's user has written to it.
  std::vector<uint8_t> frozen_written{};
  bool written = false;             ///< some rank's user has written to a parameter
  std::vector<int64_t> settings{};  ///< by rank: a hash of settings that must be the same
};

/// Adds up the terms of all ranks, and exchanges the rest of StepAgreement. `mine` has the terms of
/// this rank, and `written`, by unit, tells whether its user has written to parameters; `settings`
/// is a number below 2^48 that stands for the settings that must be the same on all ranks. No rank
/// reads the published parameters any more when this returns, since each has ended its backward
/// pass. Collective.
StepAgreement agree_on_step(const EnginePlan& plan, const std::vector<optim::SquaredNorm>& mine,
                            const std::vector<uint8_t>& written, int64_t settings);

/// Returns the norm of each parameter group's sums. The sums of the step are complete. Collective.
std::vector<double> group_norms(const EnginePlan& plan, const ReduceFlow& reduce);

}  // namespace zero
