// The memory of replicated gradients: where passes add them up, and where the update reads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/engine/gradient_reduction.h"

namespace zero {

/// The gradient of one unit, whole on the device (the gradient storage of the formula), and the
/// part of it that this rank updates. That part lies in the whole array where the update runs on
/// the device.
class WholeGradient {
 public:
  WholeGradient(const ReductionContext& context, int64_t unit);
  virtual ~WholeGradient() = default;
  WholeGradient(const WholeGradient&) = delete;
  WholeGradient& operator=(const WholeGradient&) = delete;

  const at::Tensor& whole() const { return whole_; }
  /// Returns the elements that this rank updates.
  at::Tensor owned() const;
  /// The gradient is complete: the part that this rank updates goes to where the update reads it.
  virtual void bring_down() {}
  /// Gives the part to an update, as GradientReduction::detach.
  virtual at::Tensor detach();

 protected:
  at::Tensor& cell() const { return context_.table.memory(unit_, State::gradients); }

  ReductionContext context_;
  int64_t unit_;
  at::Tensor whole_;
  at::Tensor other_;  // where gradients are doubled: what the update reads, or has read
};

/// Makes the gradient of a unit, at the place that its plan names.
std::unique_ptr<WholeGradient> make_whole_gradient(const ReductionContext& context, int64_t unit);

}  // namespace zero
