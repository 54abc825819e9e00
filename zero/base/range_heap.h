// The blocks that are cut from a range, and the holes between them. It only keeps books, on
// numbers.
//
// A block is cut from the front of a hole; neighbouring holes are merged. All but `last_fit` takes
// time logarithmic in the number of holes, as long as the best hole's front is aligned.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace zero {

/// The range. It is not thread-safe.
class RangeHeap {
 public:
  /// Makes an empty range.
  RangeHeap() = default;
  /// Makes a range of the numbers [begin, begin + bytes).
  RangeHeap(size_t begin, size_t bytes);

  /// Returns where a block of `bytes` > 0 fits best: the first multiple of `alignment` in the
  /// smallest hole that has room from there on, the first of equal ones. It takes nothing yet.
  std::optional<size_t> best_fit(size_t bytes, size_t alignment = 1) const;
  /// Returns the last place before `end` where `bytes` lie in one hole.
  std::optional<size_t> last_fit(size_t bytes, size_t end) const;
  /// Cuts a block out of the hole in which it lies.
  void take(size_t begin, size_t bytes);
  /// Returns the size of the block that begins there, or 0.
  size_t size_of(size_t begin) const;
  /// Makes the block that begins there a hole, and returns its size.
  size_t give(size_t begin);
  /// Keeps the bytes [from, to), at least one, of the block that begins there, counted from its
  /// front, and makes holes of the rest.
  void keep(size_t begin, size_t from, size_t to);

  /// Returns the bytes of all blocks.
  size_t used() const { return used_; }
  /// The holes from the smallest to the largest: bytes and begin.
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
