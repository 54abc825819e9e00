// Lets a backward function write a parameter's gradient straight to its place, so that nobody has
// to copy it there.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// A parameter holds one in its post-accumulate hook. The collector of its gradients implements
/// this beside the hook.
class GradientPlace {
 public:
  virtual ~GradientPlace() = default;
  /// Returns memory of the parameter's shape, strides and dtype, which the caller overwrites and
  /// returns to autograd as the gradient. Undefined if there is none to give: one is on its way
  /// already, or gradients are kept in another dtype.
  virtual at::Tensor place() = 0;
  /// Returns the value with which backward will begin for a loss of now: 1, or a loss scale.
  virtual double loss_factor() const { return 1; }
};

/// A backward function calls it just before it computes the gradient of `parameter`. Returns memory
/// of its shape, strides and dtype, with undefined values. The memory belongs to the collector of
/// this parameter's gradients, if there is one, and else is new. A later step overwrites it, so a
/// user's tensor hook should keep a copy of such a gradient.
at::Tensor gradient_place(const at::Tensor& parameter);

/// Returns the value with which backward will begin, as the collector of this parameter's gradients
/// knows it; 1 without a collector. Functions that compute gradients before backward, in fp16 for
/// example, compute them with it.
double loss_factor(const at::Tensor& parameter);

}  // namespace zero
