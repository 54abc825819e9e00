// The sum of exact sums over ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace zero {

/// Adds up each of `sums` over `ranks` ranks. All ranks give as many, in the same order, and get
/// the same bits (Note [Exact sums] in zero/optim/exact_sum.h). `gather(all, mine)` is a blocking
/// all-gather of Long arrays: `mine` (n), `all` (ranks * n). Sum consists of 64-bit words, and has
/// add(const Sum&).
template <class Sum, class Gather>
void add_over_ranks(std::vector<Sum>& sums, int ranks, const Gather& gather) {
  using Words = std::array<int64_t, sizeof(Sum) / sizeof(int64_t)>;
  constexpr auto kWords = static_cast<int64_t>(Words().size());
  const auto count = static_cast<int64_t>(sums.size());
  const auto mine = at::empty({count * kWords}, at::kLong);
  const auto all = at::empty({ranks * mine.numel()}, at::kLong);
  auto* sent = mine.template mutable_data_ptr<int64_t>();
  for (const auto& sum : sums) sent = std::ranges::copy(std::bit_cast<Words>(sum), sent).out;
  gather(all, mine);
  const auto* come = all.template const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    Sum sum;
    for (int rank = 0; rank < ranks; ++rank) {
      Words theirs{};
      std::copy_n(come + (rank * count + i) * kWords, kWords, theirs.begin());
      sum.add(std::bit_cast<Sum>(theirs));
    }
    sums[static_cast<size_t>(i)] = sum;
  }
}

}  // namespace zero
