#include "zero/partition/layout.h"

#include <gtest/gtest.h>

#include "zero/base/error.h"

namespace zero::partition {
namespace {

Parameter parameter(int64_t numel, int64_t kind = 0, int64_t element_bytes = 4) {
  return {"p" + std::to_string(numel), numel, element_bytes, kind};
}

// Sizes that no world size divides, a scalar, an empty parameter and one larger than a unit.
const std::vector<Parameter> kUneven{parameter(7),  parameter(1),    parameter(0),  parameter(1000),
                                     parameter(64), parameter(5000), parameter(333)};

TEST(Layout, EveryElementLiesInExactlyOneSlice) {
  for (int world = 1; world <= 7; ++world) {
    const Layout layout(kUneven, world, 4 * 1200);
    for (int64_t u = 0; u < layout.unit_count(); ++u) {
      int64_t end = 0;
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ(layout.slice(u, rank).begin, end);
        EXPECT_EQ(layout.slice(u, rank).size(), layout.slice_numel(u));
        EXPECT_EQ(layout.slice(u, rank).begin % kAlignment, 0);
        end = layout.slice(u, rank).end;
      }
      EXPECT_EQ(end, layout.unit(u).numel);
    }
  }
}

TEST(Layout, SegmentsAreAlignedDisjointAndInOrder) {
  const Layout layout(kUneven, 3, 4 * 1200);
  std::vector<int> seen(kUneven.size());
  for (const auto& unit : layout.units()) {
    int64_t end = 0;
    for (const auto& segment : unit.segments) {
      EXPECT_EQ(segment.offset % kAlignment, 0);
      EXPECT_GE(segment.offset, end);
      EXPECT_EQ(segment.numel, kUneven[static_cast<size_t>(segment.parameter)].numel);
      ++seen[static_cast<size_t>(segment.parameter)];
      end = segment.offset + segment.numel;
    }
    EXPECT_LE(end, unit.numel);
  }
  EXPECT_EQ(seen, std::vector<int>(kUneven.size(), 1));
  EXPECT_EQ(layout.content(), 7 + 1 + 1000 + 64 + 5000 + 333);
}

TEST(Layout, AUnitHoldsNoMoreThanItsBytesUnlessOneParameterIsLarger) {
  const Layout layout(kUneven, 2, 4 * 1200);
  for (const auto& unit : layout.units()) {
    if (unit.segments.size() > 1) {
      EXPECT_LE(unit.segments.back().range().end, 1200);
    }
  }
  const int64_t large = layout.unit_of(5);
  EXPECT_EQ(layout.unit(large).segments.size(), 1U);
  EXPECT_EQ(layout.unit(large).content, 5000);
}

TEST(Layout, MembershipDoesNotDependOnTheWorldSize) {
  const Layout one(kUneven, 1, 4 * 1200);
  for (int world = 2; world <= 5; ++world) {
    const Layout many(kUneven, world, 4 * 1200);
    ASSERT_EQ(many.unit_count(), one.unit_count());
    for (int64_t p = 0; p < static_cast<int64_t>(kUneven.size()); ++p) {
      EXPECT_EQ(many.unit_of(p), one.unit_of(p));
      EXPECT_EQ(many.segment_of(p).offset, one.segment_of(p).offset);
    }
  }
}

TEST(Layout, KindsDoNotShareAUnit) {
  const Layout layout(
      {parameter(10, 0), parameter(10, 1, 2), parameter(10, 0), parameter(10, 1, 2)}, 2, 1 << 20);
  ASSERT_EQ(layout.unit_count(), 2);
  EXPECT_EQ(layout.unit_of(0), layout.unit_of(2));
  EXPECT_EQ(layout.unit_of(1), layout.unit_of(3));
  EXPECT_EQ(layout.unit(1).element_bytes, 2);
}

TEST(Layout, NonsenseIsRefused) {
  EXPECT_THROW(Layout({}, 0, 1), ConfigError);
  EXPECT_THROW(Layout({}, 1, 0), ConfigError);
}

TEST(Range, IntersectionIsEmptyOrShared) {
  EXPECT_EQ(intersect({0, 10}, {5, 20}), (Range{5, 10}));
  EXPECT_TRUE(intersect({0, 5}, {5, 20}).empty());
  EXPECT_TRUE(intersect({30, 40}, {5, 20}).empty());
}

}  // namespace
}  // namespace zero::partition
