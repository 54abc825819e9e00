#include "zero/models/layers/key_value_cache.h"

#include <ATen/ATen.h>

#include "zero/models/layers/attention.h"

namespace zero {

const KeyValues& KeyValueCache::append(size_t layer, const at::Tensor& keys,
                                       const at::Tensor& values) {
  if (layer >= layers_.size()) layers_.resize(layer + 1);
  auto& held = layers_[layer];
  held.keys = held.keys.defined() ? at::cat({held.keys, keys}, 1) : keys;
  held.values = held.values.defined() ? at::cat({held.values, values}, 1) : values;
  return held;
}

void KeyValueCache::clear() {
  layers_.clear();
  length_ = 0;
}

at::Tensor cached_mask(int64_t past, int64_t sequence, int64_t window, c10::Device device) {
  if (past == 0) return window_mask(sequence, window, device);
  const auto ones =
      at::ones({sequence, past + sequence}, at::TensorOptions(at::kBool).device(device));
  return window == 0 ? ones.tril(past) : ones.tril(past).triu(past + 1 - window);
}

}  // namespace zero
