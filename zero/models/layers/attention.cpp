#include "zero/models/layers/attention.h"

#include <ATen/ATen.h>

#include <optional>

namespace zero {

at::Tensor window_mask(int64_t sequence, int64_t window, c10::Device device) {
  if (window == 0 || window >= sequence) return {};
  const auto ones = at::ones({sequence, sequence}, at::TensorOptions(at::kBool).device(device));
  return ones.tril().triu(1 - window);
}

at::Tensor causal_attention(const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, const at::Tensor& mask, double dropout) {
  const auto optional_mask = mask.defined() ? std::optional(mask) : std::nullopt;
  // The kernel reads and writes (B, T, H, D) through strides, so nothing is permuted in memory.
  const auto y = at::scaled_dot_product_attention(
      queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), optional_mask, dropout,
      /*is_causal=*/!mask.defined(), std::nullopt, keys.size(2) != queries.size(2));
  return y.transpose(1, 2).reshape({queries.size(0), queries.size(1), -1});
}

}  // namespace zero
