#include "zero/store/stripes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "zero/store/checksums.h"

namespace zero::store {
namespace {

TEST(Stripes, EveryPageHasAPlaceOfItsOwnAndFilesHaveNoGaps) {
  const std::vector<std::vector<double>> all{{1}, {1, 1}, {3, 1}, {1.7, 0.2, 2.9}, {0.001, 5}};
  for (const auto& shares : all) {
    for (const int64_t pages : {0, 1, 3, 4, 127, 128, 1000, 1023}) {
      const Stripes stripes(pages * kAlignment, 2 * kAlignment, shares);
      std::set<std::pair<size_t, int64_t>> places;
      std::vector<int64_t> ends(shares.size());
      for (int64_t page = 0; page < pages; ++page) {
        const auto place = stripes.place(page * kAlignment);
        EXPECT_EQ(place.offset % kAlignment, 0);
        places.emplace(place.file, place.offset);
        ends[place.file] = std::max(ends[place.file], place.offset + kAlignment);
      }
      EXPECT_EQ(static_cast<int64_t>(places.size()), pages);
      int64_t sum = 0;
      for (size_t file = 0; file < shares.size(); ++file) {
        EXPECT_EQ(stripes.bytes_of(file), ends[file]) << pages << " pages, file " << file;
        sum += stripes.bytes_of(file);
      }
      EXPECT_EQ(sum, pages * kAlignment);
    }
  }
}

TEST(Stripes, WhatIsContiguousIsSoInItsFile) {
  const Stripes stripes(100 * kAlignment, 4 * kAlignment, std::vector<double>{2, 1});
  for (int64_t at = 0; at < 100 * kAlignment; at += kAlignment) {
    const auto first = stripes.place(at);
    const auto last = stripes.place(at + stripes.contiguous(at) - kAlignment);
    EXPECT_EQ(first.file, last.file);
    EXPECT_EQ(last.offset + kAlignment - first.offset, stripes.contiguous(at));
  }
}

TEST(Stripes, SharesAreKeptInEveryRunOf64Blocks) {
  const Stripes stripes(256 * kAlignment, kAlignment, std::vector<double>{3, 1});
  for (int64_t start = 0; start < 192; ++start) {
    int64_t of_second = 0;
    for (int64_t block = start; block < start + 64; ++block)
      of_second += static_cast<int64_t>(stripes.place(block * kAlignment).file);
    EXPECT_EQ(of_second, 16);
  }
}

TEST(Stripes, NeighbouringBlocksLieOnDifferentDisks) {
  const Stripes stripes(256 * kAlignment, kAlignment, std::vector<double>{1, 1, 1});
  // 64 is no multiple of three: the pattern's seam has one file twice in four blocks.
  for (int64_t block = 0; block + 3 < 256; ++block) {
    std::set<size_t> files;
    for (int64_t i = 0; i < 4; ++i) files.insert(stripes.place((block + i) * kAlignment).file);
    EXPECT_EQ(files.size(), 3u) << block;
  }
}

TEST(Stripes, ADiskTooSlowToHelpGetsNothing) {
  const Stripes stripes(1000 * kAlignment, kAlignment, std::vector<double>{1, 0.001});
  EXPECT_EQ(stripes.bytes_of(0), 1000 * kAlignment);
  EXPECT_EQ(stripes.bytes_of(1), 0);
}

TEST(Stripes, OneFileIsItself) {
  const Stripes stripes(1000 * kAlignment, kAlignment, std::vector<double>{7});
  EXPECT_EQ(stripes.place(123 * kAlignment).offset, 123 * kAlignment);
  EXPECT_EQ(stripes.contiguous(123 * kAlignment), 877 * kAlignment);
}

}  // namespace
}  // namespace zero::store
