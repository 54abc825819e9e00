// The vector kernels behind tanh_gelu().
#pragma once

#include <cstdint>

namespace zero {

/// Computes y[i] = gelu(x[i]) for begin <= i < end; the arrays are bf16 or fp32. An element's
/// result does not depend on the range that it is computed in.
void gelu_forward(const void* x, void* y, int64_t begin, int64_t end, bool bf16);

/// Computes dx[i] = dy[i] gelu'(x[i]). dx may be dy.
void gelu_backward(const void* x, const void* dy, void* dx, int64_t begin, int64_t end, bool bf16);

}  // namespace zero
