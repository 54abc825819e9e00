#include "zero/store/stripes.h"

#include <ATen/ceil_div.h>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "zero/base/error.h"

namespace zero::store {

Stripes::Stripes(int64_t bytes, int64_t block_bytes, std::span<const double> shares)
    : bytes_(bytes), block_bytes_(block_bytes), blocks_(shares.size()) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  ensure(std::isfinite(sum) && sum > 0 && *std::min_element(shares.begin(), shares.end()) >= 0,
         "shares of files are not negative, and not all zero");
  const int64_t slots = shares.size() == 1 ? 1 : 64;
  for (int64_t slot = 1; slot <= slots; ++slot) {
    // The next block goes to the file that is furthest behind its share.
    const auto behind = [&](size_t file) {
      return shares[file] / sum * static_cast<double>(slot) - static_cast<double>(blocks_[file]);
    };
    size_t next = 0;
    for (size_t file = 1; file < shares.size(); ++file) {
      if (behind(file) > behind(next)) next = file;
    }
    pattern_.push_back({.file = next, .turn = blocks_[next]++});
  }
}

Stripes::Place Stripes::place(int64_t offset) const {
  const auto slots = static_cast<int64_t>(pattern_.size());
  const int64_t block = offset / block_bytes_;
  const auto& slot = pattern_[static_cast<size_t>(block % slots)];
  const int64_t before = block / slots * blocks_[slot.file] + slot.turn;
  return {slot.file, before * block_bytes_ + offset % block_bytes_};
}

int64_t Stripes::contiguous(int64_t offset) const {
  const int64_t left = bytes_ - offset;
  return blocks_.size() == 1 ? left : std::min(left, block_bytes_ - offset % block_bytes_);
}

int64_t Stripes::bytes_of(size_t file) const {
  // A file ends where its last block ends.
  const int64_t blocks = at::ceil_div(bytes_, block_bytes_);
  const auto slots = static_cast<int64_t>(pattern_.size());
  for (int64_t block = blocks - 1; block >= std::max<int64_t>(0, blocks - slots); --block) {
    const int64_t offset = block * block_bytes_;
    const auto here = place(offset);
    if (here.file == file) return here.offset + std::min(block_bytes_, bytes_ - offset);
  }
  return 0;
}

}  // namespace zero::store
