// GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// x (...) -> (...): x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, computed as x times the
/// logistic function of twice the argument: one exponential and no hyperbolic tangent. On CPUs fp32
/// and bf16 (calculated in fp32) by a vector kernel, with a backward of its own; everything else by
/// at::gelu.
at::Tensor tanh_gelu(const at::Tensor& x);

/// tanh_gelu has kernels of its own for `x`: fp32 or bf16 on a CPU.
bool has_tanh_gelu_kernel(const at::Tensor& x);
/// The kernels by themselves, not differentiable. `x` and `dy` are contiguous.
at::Tensor tanh_gelu_values(const at::Tensor& x);
/// `dx` becomes dy gelu'(x); it may be `dy`, and is contiguous too.
void tanh_gelu_gradient(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx);

}  // namespace zero
