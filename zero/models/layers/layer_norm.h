// Layer norm (Ba, Kiros and Hinton, arXiv 1607.06450) over the last dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include "zero/models/layers/residual.h"

namespace zero {

/// Maps x (..., C) to (..., C), with `weight` and `bias` (C). The result equals at::layer_norm's,
/// which it calls on the CPU and on devices without the kernels `zero::layer_norm` (y, mean and 1 /
/// deviation of each row) and `zero::layer_norm_backward` (Note [Kernels of a device] in
/// zero/optim/operators.h). With them each pass reads its inputs once, and the gradients of weight
/// and bias are computed where zero::gradient_place says.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps);

/// Returns add_branch(branch, x) of residual.h, and the layer norm of that sum. On devices with the
/// kernel `zero::add_layer_norm` it is one pass over both, forward and backward.
SumAndNorm add_layer_norm(const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias, double eps);

/// Makes the backward pass by such a kernel: returns `dx`, and overwrites `dweight` and `dbias`. dy
/// and x (N, C) are contiguous and of one dtype with weight; mean and rstd (N) are fp32. `more`,
/// which may be undefined, is like dy and is added to dx. The call is asynchronous.
at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                               const at::Tensor& rstd, const at::Tensor& weight,
                               at::Tensor& dweight, at::Tensor& dbias, const at::Tensor& more = {});

}  // namespace zero
