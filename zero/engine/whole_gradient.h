// The memory of replicated gradients: where passes add them up, and where the update reads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/engine/gradient_reduction.h"

namespace zero {

/// The gradient of one unit. It is whole on the device, in the gradient storage of the formula. The
/// update reads the elements that this rank updates there; where it runs on the host, it reads a
/// copy of them in the host's memory.
class WholeGradient {
 public:
  WholeGradient(const ReductionContext& context, int64_t unit);

  const at::Tensor& whole() const { return whole_; }
  /// Returns the elements that this rank updates.
  at::Tensor owned() const;
  /// The gradient is complete: what the update reads comes down to the host, if it runs there.
  void bring_down();
  /// Gives the elements to an update, as GradientReduction::detach.
  at::Tensor detach();

 private:
  bool on_host() const { return context_.table.plan(unit_).gradients_at == Tier::host; }
  at::Tensor make_whole(Category category) const;
  at::Tensor make_on_host(Category category) const;
  // The memory that the update reads.
  at::Tensor& cell() const { return context_.table.memory(unit_, State::gradients); }

  ReductionContext context_;
  int64_t unit_;
  at::Tensor whole_;
  at::Tensor other_;  // where gradients are doubled: takes turns with the memory that is read
};

}  // namespace zero
