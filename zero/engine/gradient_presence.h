// The knowledge of the parameters that had a gradient in a step, on this rank and on any rank.
//
// Note [Present gradients]
// A rank may leave out layers that others use. At the end of a step the ranks tell each other, in
// one small all-gather, which parameters they had a gradient for. A parameter that no rank had one
// for is not updated; if some rank had one, the others count as having had zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/engine/look_ups.h"
#include "zero/engine/placement.h"
#include "zero/engine/reduction_order.h"
#include "zero/partition/layout.h"

namespace zero {

class GradientPresence {
 public:
  /// `layout` outlives this.
  explicit GradientPresence(const partition::Layout& layout);

  /// This rank had a gradient for the parameter.
  void note(int64_t parameter) { here_[static_cast<size_t>(parameter)] = 1; }
  /// The parameter counts as having had a gradient on every rank.
  void note_everywhere(int64_t parameter);
  /// The parameter counts as having had none on every rank. After `agree`.
  void forget(int64_t parameter);

  /// Returns, by parameter, 1 if some rank had a gradient for it in this step. Known after `agree`.
  const std::vector<uint8_t>& anywhere() const { return anywhere_; }
  /// Returns whether some rank had a gradient for a parameter of the unit. Known after `agree`.
  bool wanted(int64_t unit) const { return any(unit, anywhere_); }
  /// Returns whether some rank had one in the step before.
  bool expected(int64_t unit) const { return any(unit, before_); }
  /// Returns whether this rank had a gradient for every parameter of the unit.
  bool complete_here(int64_t unit) const;

  /// A rank tells this to the others at the end of a step, besides its gradients and its order.
  struct Report {
    std::vector<uint8_t> late;   ///< by unit: 1 if a late gradient is in its bucket
    bool refuses_early = false;  ///< this rank asks to stop early reductions
    bool began_early = false;    ///< it has begun its early reductions
    bool dropped = false;        ///< it has begun reductions in a pass that has thrown
    /// By parameter, how this rank could give its gradient; empty: whole.
    std::vector<LookUpUse> look_ups{};
  };
  /// Every rank knows this after `agree`.
  struct Agreement {
    std::vector<uint8_t> late;   ///< by unit: 1 if a late gradient is in some rank's bucket
    bool refuses_early = false;  ///< some rank asks to stop early reductions
    bool began_early = false;    ///< some rank has begun its early reductions
    /// Some ranks, but not all, have begun reductions in a pass that has thrown.
    bool dropped_by_some = false;
    std::vector<LookUpUse> look_ups;  ///< by parameter, how all ranks could give its gradient
  };
  /// Exchanges the reports, which parameters had a gradient, and rank 0's order, which `order`
  /// adopts. Collective.
  Agreement agree(const Placement& placement, ReductionOrder& order, const Report& mine);

  /// Begins a step; the one before was `completed` by `agree`, or dropped.
  void clear(bool completed);

 private:
  bool any(int64_t unit, const std::vector<uint8_t>& parameters) const;
  const partition::Layout& layout_;
  std::vector<uint8_t> here_;      // by parameter, as the next two
  std::vector<uint8_t> anywhere_;  // after `agree`
  std::vector<uint8_t> before_;    // `anywhere_` of the last step that was completed
};

}  // namespace zero
