// A look-up in a table whose rows, and whose gradient, may travel without the whole table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// Returns what at::embedding returns: indices (...) int64 -> (..., C). `weight` (V, C) may come as
/// the rows that are looked up (look_up_rows), and its gradient may leave as rows
/// (GradientPlace::announce_look_up); no bit changes. The row `padding` gets no gradient (-1: all
/// do).
at::Tensor row_embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding = -1);
/// Does the same, or returns an undefined tensor where at::embedding does as well.
at::Tensor try_row_embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding);

/// Returns `rows` (..., C) of gradients as (n, C), with zeros for the indices that equal `padding`.
at::Tensor gradient_rows(const at::Tensor& rows, const at::Tensor& indices, int64_t padding);

}  // namespace zero
