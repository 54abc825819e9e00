// Keys and values of positions that a model has seen before, so that a text grows token by token
// without computing it anew.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero {

/// The keys and values of one layer, (B, S, K, D) each.
struct KeyValues {
  at::Tensor keys;
  at::Tensor values;
};

class KeyValueCache {
 public:
  /// Returns the number of positions that all layers have.
  int64_t length() const { return length_; }
  /// Appends those of new positions to a layer, and returns all that it has. (B, T, K, D).
  const KeyValues& append(size_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Counts new positions, once every layer has them.
  void advance(int64_t positions) { length_ += positions; }
  /// Forgets everything.
  void clear();

 private:
  std::vector<KeyValues> layers_;
  int64_t length_ = 0;
};

/// Returns the mask (T, past + T) by which new position i, which is past + i of the text, sees
/// positions j with past + i - window < j <= past + i; `window` 0: all j <= past + i. Undefined
/// where nothing is past and nothing is hidden but what comes later.
at::Tensor cached_mask(int64_t past, int64_t sequence, int64_t window, c10::Device device);

}  // namespace zero
