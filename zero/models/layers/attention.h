// Causal attention with groups of queries that share a key (Ainslie et al., arXiv 2305.13245) and
// with sliding windows.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace zero {

/// Returns the mask (T, T) by which position i sees positions j with i - window < j <= i; undefined
/// where that is every j <= i: `window` is 0 or not smaller than the sequence.
at::Tensor window_mask(int64_t sequence, int64_t window, c10::Device device);

/// Maps queries (B, T, H, D), keys and values (B, T, K, D) to (B, T, H D). K divides H; query head
/// h sees key head h / (H / K). Scores are multiplied by D^-0.5. `mask` is one of window_mask.
at::Tensor causal_attention(const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, const at::Tensor& mask, double dropout = 0);

}  // namespace zero
