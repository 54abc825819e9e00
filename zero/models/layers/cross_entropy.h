// Cross-entropy of a language model's output projection, without the logits of the whole batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

inline constexpr int64_t kLogitsBytes = int64_t{64} << 20;
inline constexpr int64_t kDeviceLogitsBytes = int64_t{1} << 30;

struct LinearCrossEntropyOptions {
  /// The logits that may exist at a time, as bytes in fp32; at least one row is always computed. 0:
  /// kLogitsBytes, or kDeviceLogitsBytes on a device. See Note [Rows of a chunk].
  int64_t logits_bytes = 0;
  /// The share of each row's wanted probability that is spread over the whole vocabulary, in [0,
  /// 1].
  double label_smoothing = 0;
  /// The sum of the rows' losses is divided by this; 0: by the number of rows with a target. For a
  /// mean over all the tokens of a step (of all ranks and all their micro-batches) give their
  /// number divided by the number of those micro-batches, N ranks times k of each: the engine
  /// averages the losses of all N k micro-batches.
  double divisor = 0;
  /// Backward leaves the gradient of `weight` here instead of passing it on, if defined: a slot of
  /// Note [Tied gradient] in tied_embedding.h, in whose memory it is computed.
  at::Tensor weight_slot = {};
  /// The gradients of the logits stay until backward, N x V elements, and backward computes from
  /// them the gradient of `weight`, kTileRows rows at a time, and then that of `hidden`. Where the
  /// collector of the weight's gradients takes tiles (gradient_taker in base/gradient_place.h) and
  /// there is a slot, it gets them, and the slot stays empty. The results have the same bits. Has
  /// no effect on a device, and where the weight is cast.
  bool weight_in_backward = false;
  /// Added to the logits of every row: (V), of the weight's dtype. Undefined: none is.
  at::Tensor bias = {};
};

/// Returns the mean of -log softmax(hidden weight^T)[target] over the rows whose target is not
/// -100, as an fp32 scalar; NaN when there is no such row. hidden (N, C) and weight (V, C) are
/// fp32, bf16 or fp16 and of one dtype (in a zero::Autocast scope they are cast, and the weight's
/// gradient has the weight's); targets (N) are int64. The result equals
/// at::cross_entropy_loss(hidden.mm(weight.t()) + bias, targets), with the same label smoothing, to
/// rounding; softmax statistics are fp32 for every dtype.
///
/// The logits are computed a chunk of rows at a time. When a gradient is needed it is computed in
/// the same visit of each chunk, so the projection is computed once, and no memory of size (N, V)
/// is kept (but for weight_in_backward); the gradients of `hidden` and `weight` are held until
/// backward. Hence backward can run
/// once: a second one, or a derivative of the derivative, throws zero::Error. Throws ConfigError
/// for numbers, shapes or dtypes that do not fit.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace zero
