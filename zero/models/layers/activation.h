// The activations that configurations name, in Hugging Face's spelling.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "zero/models/layers/projection.h"

namespace zero {

/// Returns the names: gelu_new (the tanh form), gelu (by the error function), relu, silu, tanh.
const std::vector<std::string>& activation_names();
/// Returns the one of them that `name` means: gelu_pytorch_tanh and gelu_fast are gelu_new, and
/// swish is silu. Other names stay as they are.
std::string activation_called(std::string name);

/// x (...) -> (...), for one of activation_names.
at::Tensor activated(const at::Tensor& x, std::string_view name);
/// second(activated(first(x), name)), a feed-forward layer. (..., in) -> (..., out).
at::Tensor feed_forward(Projection& first, Projection& second, const at::Tensor& x,
                        std::string_view name);

/// Zeros elements with probability `p` and divides the others by 1 - p, in training.
at::Tensor drop(const at::Tensor& x, double p, bool training);

}  // namespace zero
