// The gradient of a bias: sums over the rows of a matrix.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// `result` (C) becomes the sums of the columns of `matrix` (N, C; contiguous), of the same dtype
/// or a wider one. On a device it is the operator `zero::column_sums_`, which is asynchronous: it
/// runs a kernel that a plugin brings (Note [Kernels of a device] in zero/optim/operators.h), or
/// at::sum_out as on the CPU. It is not differentiable.
void column_sums_into(at::Tensor& result, const at::Tensor& matrix);

}  // namespace zero
