// Successive halving finds the fastest with few steps, and stops where speeds cannot be told apart.
#include "zero/planner/halving.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace zero::plan {
namespace {

std::vector<size_t> order(const std::vector<Tried>& tried) {
  std::vector<size_t> candidates;
  for (const auto& each : tried) candidates.push_back(each.candidate);
  return candidates;
}

TEST(Halving, FindsTheFastestAndSpendsStepsOnTheFaster) {
  const std::vector<double> seconds{5, 3, 8, 1, 2, 7, 6, 4};
  std::map<size_t, int64_t> spent;
  const auto tried = halve(seconds.size(), [&](size_t candidate, int64_t steps) {
    spent[candidate] += steps;
    return Speed{.seconds = seconds[candidate], .spread = 0.01};
  });
  EXPECT_EQ(order(tried), (std::vector<size_t>{3, 4, 1, 7, 0, 6, 5, 2}));
  EXPECT_EQ(spent[3], 4 + 8 + 16);
  EXPECT_EQ(spent[1], 4 + 8);
  EXPECT_EQ(spent[2], 4);
  EXPECT_EQ(tried.front().steps, 16);
}

TEST(Halving, TakesTheExpectedOneOfThoseThatAreAlike) {
  int runs = 0;
  const auto tried = halve(4, [&](size_t candidate, int64_t /*steps*/) {
    ++runs;
    return Speed{.seconds = candidate == 2 ? 0.99 : 1.0, .spread = 0.02};
  });
  EXPECT_EQ(order(tried), (std::vector<size_t>{0, 1, 2, 3}));
  EXPECT_EQ(runs, 4);
}

TEST(Halving, PutsThoseThatDoNotRunLast) {
  const auto tried = halve(3, [&](size_t candidate, int64_t /*steps*/) {
    return candidate == 0 ? Speed{.failure = "It did not fit."}
                          : Speed{.seconds = 3.0 - static_cast<double>(candidate)};
  });
  EXPECT_EQ(order(tried), (std::vector<size_t>{2, 1, 0}));
  EXPECT_TRUE(halve(0, [](size_t, int64_t) { return Speed{}; }).empty());
  EXPECT_EQ(halve(2, [](size_t, int64_t) { return Speed{.failure = "No."}; }).size(), 2U);
}

}  // namespace
}  // namespace zero::plan
