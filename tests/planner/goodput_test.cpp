#include "zero/planner/goodput.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace zero::plan {
namespace {

constexpr double kHour = 3600;

// Daly's interval is as good as the best of a fine search, and near Young's if checkpoints are
// short.
TEST(Goodput, TheIntervalIsTheBest) {
  for (const double devices : {8.0, 1024.0, 16384.0}) {
    const Failures failures{.between = 50000 * kHour,
                            .devices = static_cast<int64_t>(devices),
                            .checkpoint = 60,
                            .restart = 300};
    double best = 0;
    for (double interval = 10; interval < 1e7; interval *= 1.001)
      best = std::max(best, goodput(failures, interval));
    EXPECT_NEAR(goodput(failures, best_interval(failures)), best, 1e-4 * best) << devices;
    EXPECT_NEAR(best_interval(failures), youngs_interval(failures),
                0.1 * youngs_interval(failures));
  }
}

// More devices fail more often.
TEST(Goodput, FallsWithTheNumberOfDevices) {
  double before = 1;
  for (const int64_t devices : {int64_t{1}, int64_t{64}, int64_t{4096}, int64_t{262144}}) {
    const Failures failures{
        .between = 50000 * kHour, .devices = devices, .checkpoint = 60, .restart = 300};
    const double now = goodput(failures, best_interval(failures));
    EXPECT_LT(now, before);
    EXPECT_GT(now, 0);
    before = now;
  }
}

}  // namespace
}  // namespace zero::plan
