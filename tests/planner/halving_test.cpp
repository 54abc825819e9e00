// Successive halving finds the fastest with few steps, and stops where speeds cannot be told apart.
#include "zero/planner/halving.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
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
    return Speed{.seconds = seconds[candidate], .standard_error = 0.01};
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
    return Speed{.seconds = candidate == 2 ? 0.99 : 1.0, .standard_error = 0.02};
  });
  EXPECT_EQ(order(tried), (std::vector<size_t>{0, 1, 2, 3}));
  EXPECT_EQ(runs, 4);
}

TEST(Halving, TellsApartByMoreSteps) {
  // Steps spread evenly over half to one and a half of their median.
  const auto steps_of = [](double median, int64_t count) {
    std::vector<double> seconds;
    for (int64_t i = 0; i < count; ++i)
      seconds.push_back(median * (1 + (i % 2 == 0 ? 1 : -1) * static_cast<double>(i / 2 + 1) /
                                          static_cast<double>(count)));
    return seconds;
  };
  const auto few = speed_of_steps(steps_of(20, 16));
  const auto many = speed_of_steps(steps_of(20, 64));
  EXPECT_NEAR(few.seconds, 20, 1e-9);
  EXPECT_NEAR(many.seconds, 20, 1e-9);
  EXPECT_NEAR(few.standard_error / many.standard_error, 2, 0.4);
  // Quartiles of 15 and 25: 1.858 x 5 / sqrt(64).
  EXPECT_NEAR(many.standard_error, 1.16, 0.05);
  const auto tried = halve(2,
                           [&](size_t candidate, int64_t steps) {
                             return speed_of_steps(steps_of(candidate == 0 ? 25 : 20, steps));
                           },
                           {.first_steps = 32});
  EXPECT_EQ(order(tried), (std::vector<size_t>{1, 0}));
  const auto alike = halve(2, [&](size_t candidate, int64_t steps) {
    return speed_of_steps(steps_of(candidate == 0 ? 25 : 20, steps));
  });
  EXPECT_EQ(order(alike), (std::vector<size_t>{0, 1}));
  EXPECT_NE(speed_of_steps({1, 2}).failure.find("2 steps"), std::string::npos);
  EXPECT_EQ(speed_of_steps({1, 2, 3}).failure, "");
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
