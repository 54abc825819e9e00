// The backward pass of y = x W + b, for the insides of autograd functions.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// Returns a weight as (in, out): `transposed` says that it lies as (out, in).
inline at::Tensor as_in_out(const at::Tensor& weight, bool transposed) {
  return transposed ? weight.t() : weight;
}

/// Returns `tensor`, which may be undefined, in the dtype of x.
///
/// Note [Casts of a linear layer]
/// Under autocast x comes in 16 bits, and weight and bias stay as they are (fp32): each pass casts
/// them for itself, so that no copy of a weight lives from forward to backward, and their gradients
/// go in fp32 to where they are collected.
inline at::Tensor in_dtype_of(const at::Tensor& x, const at::Tensor& tensor) {
  const bool casts = tensor.defined() && tensor.scalar_type() != x.scalar_type();
  return casts ? tensor.to(x.scalar_type()) : tensor;
}

struct WantedGradients {
  bool x = false, weight = false, bias = false;
};

/// Gradients that are not wanted are undefined.
struct LinearGradients {
  at::Tensor x, weight, bias;
};

/// Returns the gradients for that of the result, `dy` (rows, out; contiguous). `x` (rows, in) may
/// be undefined if that of the weight is not wanted, and `bias` (out) if its own is not. Those of
/// weight and bias are where they are collected (zero::gradient_place). Not differentiable.
LinearGradients linear_gradients(const at::Tensor& dy, const at::Tensor& x,
                                 const at::Tensor& weight, const at::Tensor& bias, bool transposed,
                                 WantedGradients wanted);

}  // namespace zero
