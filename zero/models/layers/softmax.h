// Softmax, loss and gradient of rows of logits in one visit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// The target that marks a row without loss and without gradient, as in LibTorch's losses.
inline constexpr int64_t kIgnoredTarget = -100;

/// The sum over the rows whose target is not kIgnoredTarget of log(sum_v exp(logits[row, v])) -
/// logits[row, target], an fp64 scalar. With `gradient`, logits (N, V; fp32, bf16 or fp16) becomes
/// (softmax(logits) - onehot(target)) * row_scale; otherwise its contents are lost. targets (N)
/// int64; row_scale (N) fp32, zero for ignored rows. Throws DataError for a target outside of [0,
/// V).
///
/// On a device it is the operator `zero::softmax_cross_entropy_` of LibTorch's dispatcher, which is
/// asynchronous: a plugin may bring a kernel (Note [Kernels of a device] in
/// zero/optim/operators.h), for logits whose rows lie stride(0) apart, and elsewhere the function
/// below runs. A target outside of [0, V) is found by the device then, as LibTorch's losses find
/// it.
at::Tensor softmax_cross_entropy_(at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& row_scale, bool gradient);

/// The same from LibTorch's operators: what runs on devices without a kernel, and what the kernels
/// are tested against.
at::Tensor softmax_cross_entropy_reference_(at::Tensor& logits, const at::Tensor& targets,
                                            const at::Tensor& row_scale, bool gradient);

}  // namespace zero
