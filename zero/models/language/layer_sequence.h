// A model as a sequence of layers, for those who decide themselves in which order micro-batches
// pass through them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "zero/models/recompute/recompute.h"

namespace zero {

/// A model together with the micro-batches of one step. The loss of micro-batch i is
/// loss(layers.back()(... layers.front()(inputs()[i]) ...), i). Layers keep to what
/// zero::recompute says of functions: what one captures are parameters, or tensors without a
/// gradient.
struct LayerSequence {
  /// Computes what enters the first layer, for every micro-batch, together where that is cheaper.
  /// Its graph is kept meanwhile, so it should keep little (an embedding). Tensors may need
  /// no gradient.
  std::function<std::vector<std::vector<at::Tensor>>()> inputs;
  std::vector<TensorFunction> layers;
  /// Parameters that several of these functions use.
  std::vector<at::Tensor> shared{};
  /// A loss of one element.
  std::function<at::Tensor(const std::vector<at::Tensor>& last, int64_t micro_batch)> loss;
  /// Counts the texts of a micro-batch whose largest logit is that of their class; null for a model
  /// that does not tell classes apart.
  std::function<int64_t(const std::vector<at::Tensor>& last, int64_t micro_batch)> correct{};
};

}  // namespace zero
