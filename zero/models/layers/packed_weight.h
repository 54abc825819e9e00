// Matrices that are kept in few bits as tensors of bytes: zero/optim/base_format.h has the formats.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/optim/base_format.h"

namespace zero {

/// Returns a matrix's bytes, 1-D, in the order of its storage, which is dense. `values` has any
/// floating-point dtype, and is on the CPU. A tensor without values (zero::WithoutValues) gives
/// bytes without values.
at::Tensor packed_weight(const at::Tensor& values, BaseFormat format);

/// Returns the matrix of `rows` and `columns` that bytes hold, in `dtype`: Float, BFloat16 or Half.
/// It is an operator, so that a parameter of stage 3 is gathered for it: its bytes alone cross
/// between ranks. On the CPU it runs optim::unpack; on any other device the operators of
/// `unpacked_weight_reference`. Not differentiable. Throws ConfigError for bytes of another matrix.
at::Tensor unpacked_weight(const at::Tensor& packed, BaseFormat format, int64_t rows,
                           int64_t columns, at::ScalarType dtype);

/// Does the same by LibTorch's operators, to the same bits.
at::Tensor unpacked_weight_reference(const at::Tensor& packed, BaseFormat format, int64_t rows,
                                     int64_t columns, at::ScalarType dtype);

}  // namespace zero
