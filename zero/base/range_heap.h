// The bookkeeping of blocks that are cut from a range of numbers, and of the holes between them.
//
// A block is cut from the front of a hole; neighbouring holes are merged. All functions except
// `last_fit` take time logarithmic in the number of holes, as long as the front of the best hole is
// aligned.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace zero {

/// A range with its blocks and holes. It is not thread-safe.
class RangeHeap {
 public:
  /// Makes an empty range.
  RangeHeap() = default;
  /// Makes a range of the numbers [begin, begin + bytes).
  RangeHeap(size_t begin, size_t bytes);

  /// Returns the place where a block of `bytes` > 0 fits best: the first multiple of `alignment` in
  /// the smallest hole that has room from there on. Of several such holes it is the first. Nothing
  /// is taken yet.
  std::optional<size_t> best_fit(size_t bytes, size_t alignment = 1) const;
  /// Returns the last place before `end` from which `bytes` bytes lie in one hole.
  std::optional<size_t> last_fit(size_t bytes, size_t end) const;
  /// Cuts a block out of the hole in which it lies.
  void take(size_t begin, size_t bytes);
  /// Returns the size of the block that begins at `begin`, or 0.
  size_t size_of(size_t begin) const;
  /// Makes the block that begins at `begin` a hole, and returns its size.
  size_t give(size_t begin);
  /// Keeps only the bytes [from, to) of the block that begins at `begin`, counted from its front;
  /// there must be at least one. Makes holes of the rest.
  void keep(size_t begin, size_t from, size_t to);

  /// Returns the bytes of all blocks.
  size_t used() const { return used_; }
  /// Returns the size and the begin of each hole, from the smallest to the largest.
  const std::set<std::pair<size_t, size_t>>& holes() const { return holes_by_size_; }

 private:
  using Holes = std::map<size_t, size_t>;  // begin -> bytes
  void add_hole(size_t begin, size_t bytes);
  void remove_hole(Holes::iterator hole);
  void merge_hole(size_t begin, size_t bytes);

  Holes holes_;
  std::set<std::pair<size_t, size_t>> holes_by_size_;
  std::unordered_map<size_t, size_t> blocks_;
  size_t used_ = 0;
};

}  // namespace zero
