#include "zero/base/range_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <vector>

namespace zero {
namespace {

// Keeps one flag a number: slow, but plainly right.
class PlainHeap {
 public:
  explicit PlainHeap(size_t bytes) : used_(bytes, false) {}

  struct Hole {
    size_t begin, end;
  };
  std::vector<Hole> holes() const {
    std::vector<Hole> holes;
    for (size_t at = 0; at < used_.size(); ++at) {
      if (used_[at]) continue;
      const size_t begin = at;
      while (at < used_.size() && !used_[at]) ++at;
      holes.push_back({begin, at});
    }
    return holes;
  }
  std::optional<size_t> best_fit(size_t bytes, size_t alignment) const {
    std::optional<Hole> best;
    for (const auto& hole : holes()) {
      const size_t place = (hole.begin + alignment - 1) / alignment * alignment;
      if (place + bytes <= hole.end && (!best || hole.end - hole.begin < best->end - best->begin))
        best = hole;
    }
    if (!best) return std::nullopt;
    return (best->begin + alignment - 1) / alignment * alignment;
  }
  std::optional<size_t> last_fit(size_t bytes, size_t end) const {
    for (size_t at = std::min(end, used_.size()) + 1; at-- > bytes;) {
      bool free = true;
      for (size_t i = at - bytes; i < at; ++i) free = free && !used_[i];
      if (free) return at - bytes;
    }
    return std::nullopt;
  }
  void set(size_t begin, size_t bytes, bool used) {
    for (size_t i = begin; i < begin + bytes; ++i) used_[i] = used;
  }

 private:
  std::vector<bool> used_;
};

TEST(RangeHeap, PlacesBlocksAsAPlainSearchDoes) {
  constexpr size_t kBytes = 300;
  std::mt19937 random(7);
  const auto number = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(1, most)(random);
  };
  RangeHeap heap(0, kBytes);
  PlainHeap plain(kBytes);
  std::map<size_t, size_t> blocks;
  size_t used = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto choice = number(10);
    if (choice <= 5) {
      const size_t bytes = number(40);
      const size_t alignment = size_t{1} << (number(5) - 1);
      const size_t end = number(kBytes);
      const bool last = choice == 1;
      const auto place = last ? heap.last_fit(bytes, end) : heap.best_fit(bytes, alignment);
      ASSERT_EQ(place, last ? plain.last_fit(bytes, end) : plain.best_fit(bytes, alignment));
      if (!place) continue;
      heap.take(*place, bytes);
      plain.set(*place, bytes, true);
      blocks.emplace(*place, bytes);
      used += bytes;
    } else if (!blocks.empty()) {
      const auto block = std::next(blocks.begin(), static_cast<long>(number(blocks.size()) - 1));
      const auto [begin, bytes] = *block;
      blocks.erase(block);
      ASSERT_EQ(heap.size_of(begin), bytes);
      size_t from = 0, to = 0;
      if (choice == 6) {
        from = number(bytes) - 1;
        to = from + number(bytes - from);
        heap.keep(begin, from, to);
        blocks.emplace(begin + from, to - from);
      } else {
        ASSERT_EQ(heap.give(begin), bytes);
      }
      plain.set(begin, bytes, false);
      plain.set(begin + from, to - from, true);
      used -= bytes - (to - from);
    }
    ASSERT_EQ(heap.used(), used);
    const auto holes = plain.holes();
    ASSERT_EQ(heap.holes().size(), holes.size()) << "neighbouring holes are one";
    for (const auto& hole : holes)
      ASSERT_TRUE(heap.holes().contains({hole.end - hole.begin, hole.begin}));
  }
}

TEST(RangeHeap, BeginsAnywhereAndMayBeEmpty) {
  RangeHeap heap(1000, 24);
  EXPECT_EQ(heap.best_fit(8, 16), 1008u);
  EXPECT_EQ(heap.best_fit(25), std::nullopt);
  EXPECT_EQ(heap.size_of(1000), 0u);
  const RangeHeap none;
  EXPECT_EQ(none.best_fit(1), std::nullopt);
  EXPECT_EQ(none.last_fit(1, 100), std::nullopt);
}

TEST(RangeHeapDeathTest, ABlockIsGivenBackOnce) {
  RangeHeap heap(0, 100);
  heap.take(10, 20);
  heap.give(10);
  EXPECT_DEATH(heap.give(10), "that was not cut");
  EXPECT_DEATH(heap.take(90, 20), "no hole");
}

}  // namespace
}  // namespace zero
