// The linear layer, with its three matrix products each where it is fastest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/optim/base_format.h"

namespace zero {

/// How a linear layer's weight lies.
enum class WeightLayout {
  in_out,  ///< (in, out): y = x W, as in Hugging Face's GPT-2 files
  out_in,  ///< (out, in): y = x W^T, as in torch::nn::Linear
};

/// Maps x (..., in) to (..., out); `bias` (out) may be undefined. The result equals that of
/// torch::nn::functional::linear up to the order of the sums, and is differentiable as often. In
/// backward the gradients of weight and bias are computed where zero::gradient_place says, if it
/// says so. In a zero::Autocast scope x, weight and bias are cast, and the result has that dtype;
/// the weight is cast again in backward. Throws ConfigError for dtypes that do not go together.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout = WeightLayout::out_in);

/// Returns linear(tanh_gelu(x), weight, bias, layout), the second half of a feed-forward layer,
/// which keeps x alone for backward and computes its GELU again there: a quarter of what a
/// transformer's block keeps, for a two-hundredth of its time. Backward runs once (there is no
/// second derivative).
at::Tensor gelu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       WeightLayout layout = WeightLayout::out_in);

/// Returns linear(x, W, bias, layout) of a frozen W, whose bytes in `format` are `packed`
/// (packed_weight.h). `out` is the width of the result. Forward and backward each read W back, in
/// the dtype of the product, for themselves. Throws ConfigError for bytes of another matrix.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, BaseFormat format,
                         int64_t out, const at::Tensor& bias,
                         WeightLayout layout = WeightLayout::out_in);

}  // namespace zero
