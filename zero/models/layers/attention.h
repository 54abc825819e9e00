// Causal attention with groups of queries that share a key (Ainslie et al., arXiv 2305.13245), with
// sliding windows, and inside of documents that are packed into one sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "zero/models/layers/documents.h"

namespace zero {

/// Returns the mask (T, T) by which position i sees positions j with i - window < j <= i; undefined
/// where that is every j <= i: `window` is 0 or not smaller than the sequence.
at::Tensor window_mask(int64_t sequence, int64_t window, c10::Device device);

/// Says which keys a query sees.
struct AttentionMask {
  /// One of window_mask, or of cached_mask (key_value_cache.h); undefined: all that are not later.
  at::Tensor seen{};
  /// A query sees keys of its own document alone, and `seen` is for the longest of them. Null: each
  /// row is one document.
  std::shared_ptr<const Documents> documents{};
};

/// Maps queries (B, T, H, D), keys and values (B, T, K, D) to (B, T, H D). K divides H; query head
/// h sees key head h / (H / K). Scores are multiplied by `scale`, or by D^-0.5. Documents pass one
/// after the other: there is no mask of (T, T), and short documents take less time.
at::Tensor causal_attention(const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, const AttentionMask& mask, double dropout = 0,
                            std::optional<double> scale = {});

}  // namespace zero
