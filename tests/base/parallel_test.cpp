#include "zero/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace zero {
namespace {

TEST(ParallelFor, CoversTheRangeOnceOnAnyNumberOfThreads) {
  constexpr int64_t kNumel = 1000;
  for (const bool alone : {false, true}) {
    std::vector<std::atomic<int>> seen(kNumel);
    const auto visit = [&] {
      parallel_for(0, kNumel, 10, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) ++seen[static_cast<size_t>(i)];
      });
    };
    if (alone) {
      const OneThread one;
      visit();
    } else {
      visit();
    }
    for (const auto& count : seen) EXPECT_EQ(count, 1);
  }
}

TEST(ParallelFor, StaysOnItsThreadWhereItIsToldTo) {
  std::thread([] {
    const OneThread outer;
    { const OneThread inner; }
    int calls = 0;
    parallel_for(0, 1 << 20, 1, [&](int64_t first, int64_t last) {
      ++calls;
      EXPECT_EQ(first, 0);
      EXPECT_EQ(last, 1 << 20);
    });
    EXPECT_EQ(calls, 1);
    parallel_for(3, 3, 1, [&](int64_t, int64_t) { ++calls; });
    EXPECT_EQ(calls, 1);
  }).join();
  EXPECT_FALSE(OneThread::here());
}

}  // namespace
}  // namespace zero
