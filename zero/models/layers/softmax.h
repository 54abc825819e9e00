// Softmax, loss and gradient of rows of logits in one visit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// The target that marks a row without loss and without gradient, as in LibTorch's losses.
inline constexpr int64_t kIgnoredTarget = -100;

/// Returns the sum of the losses of the rows whose target is not kIgnoredTarget, an fp64 scalar.
/// With s = `smoothing` in [0, 1], a row's wanted probabilities are q = (1 - s) onehot(target) +
/// s / V (label smoothing: Szegedy et al., arXiv 1512.00567, section 7), and its loss is
/// log(sum_v exp(logits[row, v])) - sum_v q[v] logits[row, v]. With `gradient`, logits (N, V; fp32,
/// bf16 or fp16) becomes (softmax(logits) - q) * row_scale; otherwise its contents are lost.
/// targets (N) int64; row_scale (N) fp32, zero for ignored rows. Throws DataError for a target
/// outside of [0, V).
///
/// On a device it is the operator `zero::softmax_cross_entropy_` of LibTorch's dispatcher, which is
/// asynchronous: a plugin may bring a kernel (Note [Kernels of a device] in
/// zero/optim/operators.h), for logits whose rows lie stride(0) apart, and elsewhere the function
/// below runs. A target outside of [0, V) is found by the device then, as LibTorch's losses find
/// it.
at::Tensor softmax_cross_entropy_(at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& row_scale, bool gradient, double smoothing = 0);

/// Does the same by LibTorch's operators. It runs on devices without a kernel, and kernels are
/// tested against it.
at::Tensor softmax_cross_entropy_reference_(at::Tensor& logits, const at::Tensor& targets,
                                            const at::Tensor& row_scale, bool gradient,
                                            double smoothing = 0);

}  // namespace zero
