#include "zero/models/layers/attention.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

namespace zero {
namespace {

struct Scores {
  double dropout = 0;
  std::optional<double> scale{};
};

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& seen, const Scores& scores) {
  const auto mask = seen.defined() ? std::optional(seen) : std::nullopt;
  // The kernel reads and writes (B, T, H, D) through strides, so nothing is permuted in memory.
  const auto y = at::scaled_dot_product_attention(
      queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask, scores.dropout,
      /*is_causal=*/!seen.defined(), scores.scale, keys.size(2) != queries.size(2));
  return y.transpose(1, 2).reshape({queries.size(0), queries.size(1), -1});
}

// It uses one split, and not a view of each document: the backward of a split writes all gradients
// side by side once instead of adding a zero-padded one for each document.
at::Tensor attend_in_documents(const at::Tensor& queries, const at::Tensor& keys,
                               const at::Tensor& values, const at::Tensor& seen,
                               const Documents& documents, const Scores& scores) {
  const auto parts = [&](const at::Tensor& x) {
    return x.flatten(0, 1).unsqueeze(0).split_with_sizes(documents.lengths, 1);
  };
  const auto queries_of = parts(queries);
  const auto keys_of = parts(keys);
  const auto values_of = parts(values);
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < documents.lengths.size(); ++i) {
    // The mask of a shorter sequence is a corner of that of a longer one.
    const int64_t length = documents.lengths[i];
    const auto corner =
        seen.defined() ? seen.narrow(0, 0, length).narrow(1, 0, length) : at::Tensor();
    all.push_back(attend(queries_of[i], keys_of[i], values_of[i], corner, scores));
  }
  return at::cat(all, 1).view({queries.size(0), queries.size(1), -1});
}

}  // namespace

at::Tensor window_mask(int64_t sequence, int64_t window, c10::Device device) {
  if (window == 0 || window >= sequence) return {};
  const auto ones = at::ones({sequence, sequence}, at::TensorOptions(at::kBool).device(device));
  return ones.tril().triu(1 - window);
}

at::Tensor causal_attention(const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, const AttentionMask& mask, double dropout,
                            std::optional<double> scale) {
  const Scores scores{.dropout = dropout, .scale = scale};
  const auto rows = static_cast<size_t>(queries.size(0));
  if (mask.documents && mask.documents->lengths.size() > rows)
    return attend_in_documents(queries, keys, values, mask.seen, *mask.documents, scores);
  return attend(queries, keys, values, mask.seen, scores);
}

}  // namespace zero
