// Matrices in 4 bits as tensors of bytes: Note [NF4] in zero/optim/nf4.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// Returns a matrix's bytes, 1-D, in the order of its storage, which is dense. `values` has any
/// floating-point dtype, and is on the CPU. A tensor without values (zero::WithoutValues) gives
/// bytes without values.
at::Tensor nf4_packed(const at::Tensor& values);

/// Returns the matrix of `rows` and `columns` that bytes hold, in `dtype`: Float, BFloat16 or Half.
/// It is an operator, so that a parameter of stage 3 is gathered for it: its bytes alone cross
/// between ranks. On the CPU it runs nf4_dequantise; on any other device the operators of
/// `nf4_values_reference`. Not differentiable.
at::Tensor nf4_values(const at::Tensor& packed, int64_t rows, int64_t columns,
                      at::ScalarType dtype);

/// Does the same by LibTorch's operators, to the same bits.
at::Tensor nf4_values_reference(const at::Tensor& packed, int64_t rows, int64_t columns,
                                at::ScalarType dtype);

}  // namespace zero
