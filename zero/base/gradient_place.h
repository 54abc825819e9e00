// Where a backward function should write the gradient of a parameter, so that nobody has to copy it
// from there.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// Held by a parameter in its post-accumulate hook: who collects gradients implements this beside
/// the hook.
class GradientPlace {
 public:
  virtual ~GradientPlace() = default;
  /// Memory of the parameter's shape, strides and dtype, which the caller overwrites and returns to
  /// autograd as the gradient; undefined where there is none to give (one is on its way already, or
  /// gradients are kept in another dtype).
  virtual at::Tensor place() = 0;
  /// What backward will begin with for a loss of now: 1, or a loss scale.
  virtual double loss_factor() const { return 1; }
};

/// To be called by a backward function just before it computes the gradient of `parameter`: memory
/// of its shape, strides and dtype, with undefined values. It belongs to whoever collects the
/// gradients of `parameter`, if anybody does, and else is new. What a user's tensor hook keeps of
/// such a gradient is overwritten in a later step: it should keep a copy.
at::Tensor gradient_place(const at::Tensor& parameter);

/// What backward will begin with, as who collects the gradients of `parameter` knows it; 1 where
/// nobody does. For a function that computes gradients before backward, in fp16 say: as they would
/// be in backward.
double loss_factor(const at::Tensor& parameter);

}  // namespace zero
