// Lets a backward function write a parameter's gradient straight to its final place, so that no
// copy is needed.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// A parameter's post-accumulate hook may hold such a place. The collector of the gradients
/// implements it together with the hook.
class GradientPlace {
 public:
  virtual ~GradientPlace() = default;
  /// Returns memory of the parameter's shape, strides and dtype. The caller overwrites it and
  /// returns it to autograd as the gradient. Returns an undefined tensor if there is no such
  /// memory: if a gradient is on its way already, or if gradients are kept in another dtype.
  virtual at::Tensor place() = 0;
  /// Returns the value with which backward begins for a loss that is computed now: 1, or a loss
  /// scale.
  virtual double loss_factor() const { return 1; }
};

/// Returns memory of the shape, strides and dtype of `parameter`, with undefined values. A backward
/// function calls it just before it computes the gradient of `parameter`. The memory belongs to the
/// collector of this parameter's gradients, if there is one; otherwise it is new. A later step
/// overwrites it, so a user's tensor hook that keeps such a gradient should copy it.
at::Tensor gradient_place(const at::Tensor& parameter);

/// Returns the value with which backward will begin, as the collector of this parameter's gradients
/// knows it, or 1 without a collector. Functions that compute gradients before backward, in fp16
/// for example, compute them with this factor.
double loss_factor(const at::Tensor& parameter);

}  // namespace zero
