// The gates of a feed-forward layer (Shazeer, arXiv 2002.05202).
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// Returns silu(gate) * up, elementwise, of one shape and dtype. Keeps its two inputs alone for
/// backward. It is differentiable twice. Devices with the kernels `zero::gate` and
/// `zero::gate_backward` (Note [Kernels of a device] in zero/optim/operators.h) make each pass at
/// once.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Does the same with GELU in its tanh form in place of SiLU.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace zero
