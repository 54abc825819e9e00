#include "zero/base/range_heap.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>

#include "zero/base/error.h"

namespace zero {

RangeHeap::RangeHeap(size_t begin, size_t bytes) {
  if (bytes > 0) add_hole(begin, bytes);
}

std::optional<size_t> RangeHeap::best_fit(size_t bytes, size_t alignment) const {
  for (auto hole = holes_by_size_.lower_bound({bytes, 0}); hole != holes_by_size_.end(); ++hole) {
    const auto [length, begin] = *hole;
    const size_t place = at::round_up(begin, alignment);
    if (length - bytes >= place - begin) return place;
  }
  return std::nullopt;
}

std::optional<size_t> RangeHeap::last_fit(size_t bytes, size_t end) const {
  for (auto hole = holes_.rbegin(); hole != holes_.rend(); ++hole) {
    const size_t last = std::min(hole->first + hole->second, end);
    if (last >= hole->first + bytes) return last - bytes;
  }
  return std::nullopt;
}

void RangeHeap::take(size_t begin, size_t bytes) {
  auto hole = holes_.upper_bound(begin);
  ensure(hole != holes_.begin(), "a block is cut from where there is no hole");
  --hole;
  const auto [hole_begin, hole_bytes] = *hole;
  const size_t end = hole_begin + hole_bytes;
  ensure(bytes > 0 && begin + bytes <= end, "a block is cut from where there is no hole");
  remove_hole(hole);
  if (hole_begin < begin) add_hole(hole_begin, begin - hole_begin);
  if (begin + bytes < end) add_hole(begin + bytes, end - begin - bytes);
  blocks_.emplace(begin, bytes);
  used_ += bytes;
}

size_t RangeHeap::size_of(size_t begin) const {
  const auto block = blocks_.find(begin);
  return block == blocks_.end() ? 0 : block->second;
}

size_t RangeHeap::give(size_t begin) {
  const auto block = blocks_.find(begin);
  ensure(block != blocks_.end(), "a block is given back that was not cut");
  const size_t bytes = block->second;
  blocks_.erase(block);
  used_ -= bytes;
  merge_hole(begin, bytes);
  return bytes;
}

void RangeHeap::keep(size_t begin, size_t from, size_t to) {
  const auto block = blocks_.find(begin);
  ensure(block != blocks_.end() && from < to && to <= block->second,
         "the part to keep is not in the block");
  const size_t bytes = block->second;
  blocks_.erase(block);
  blocks_.emplace(begin + from, to - from);
  used_ -= bytes - (to - from);
  if (from > 0) merge_hole(begin, from);
  if (to < bytes) merge_hole(begin + to, bytes - to);
}

void RangeHeap::merge_hole(size_t begin, size_t bytes) {
  auto next = holes_.lower_bound(begin);
  if (next != holes_.end() && next->first == begin + bytes) {
    bytes += next->second;
    remove_hole(next++);
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      remove_hole(previous);
    }
  }
  add_hole(begin, bytes);
}

void RangeHeap::add_hole(size_t begin, size_t bytes) {
  holes_.emplace(begin, bytes);
  holes_by_size_.emplace(bytes, begin);
}

void RangeHeap::remove_hole(Holes::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

}  // namespace zero
