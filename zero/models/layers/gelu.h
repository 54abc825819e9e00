// GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// Maps x (...) to (...): x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, computed as x times
/// the logistic function of twice the argument: one exponential and no hyperbolic tangent. It is
/// computed by a kernel of libzero's with a backward of its own if has_tanh_gelu_kernel, and else
/// by at::gelu.
at::Tensor tanh_gelu(const at::Tensor& x);

/// Returns whether there is a kernel: on CPUs for fp32 and bf16 (calculated in fp32), by vectors;
/// on devices for which a plugin brings `zero::tanh_gelu` and `zero::tanh_gelu_backward` (Note
/// [Kernels of a device] in zero/optim/operators.h).
bool has_tanh_gelu_kernel(const at::Tensor& x);
/// The next three call the kernels by themselves, and are not differentiable. `x` and `dy` are
/// contiguous.
at::Tensor tanh_gelu_values(const at::Tensor& x);
/// `dx` becomes dy gelu'(x); it may be `dy`, and is contiguous too.
void tanh_gelu_gradient(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx);
/// Does both: returns tanh_gelu_values(x), and `dy` becomes dy gelu'(x). On a device it takes one
/// pass.
at::Tensor tanh_gelu_again(const at::Tensor& x, const at::Tensor& dy);

}  // namespace zero
