// Tests which rank is said to keep the others waiting.
#include "zero/train/stragglers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zero::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// Returns what is said over `windows` windows of steps that all take `times`.
std::string told(Stragglers& stragglers, const std::vector<RankTime>& times, size_t windows = 1) {
  std::string all;
  for (size_t step = 0; step < windows * Stragglers::kWindow; ++step) all += stragglers.add(times);
  return all;
}

TEST(Stragglers, NamesARankThatIsSlowedByThirtyPercent) {
  Stragglers two(2);
  EXPECT_THAT(told(two, {{1000, 0}, {1300, 0}}),
              AllOf(HasSubstr("Rank 1 is slow: it takes 1300 ms a step where the others take 1000"),
                    HasSubstr("computation"), Not(HasSubstr("host"))));
  Stragglers four(4, 2);
  EXPECT_THAT(told(four, {{1000, 0}, {990, 0}, {1320, 300}, {1010, 0}}),
              AllOf(HasSubstr("Rank 2 (host 1) is slow"), HasSubstr("its disk makes 300 ms"),
                    Not(HasSubstr("Rank 0"))));
}

TEST(Stragglers, SaysNothingOfRanksThatAreAlike) {
  Stragglers three(3);
  EXPECT_EQ(told(three, {{1000, 0}, {1100, 0}, {1150, 0}}, 5), "");
  Stragglers alone(1);
  EXPECT_EQ(told(alone, {{1000, 0}}, 5), "");
}

TEST(Stragglers, AFewSlowStepsSayNothing) {
  Stragglers stragglers(2);
  std::string all;
  for (size_t step = 0; step < 10 * Stragglers::kWindow; ++step)
    all += stragglers.add(std::vector<RankTime>{{100, 0}, {step % 4 == 0 ? 5000.0F : 100.0F, 0}});
  EXPECT_EQ(all, "");
}

TEST(Stragglers, TellsOnceAndAgainWhereItComesBack) {
  Stragglers stragglers(2);
  const std::vector<RankTime> slow{{1000, 0}, {1500, 0}};
  const std::vector<RankTime> even{{1000, 0}, {1000, 0}};
  EXPECT_NE(told(stragglers, slow), "");
  EXPECT_EQ(told(stragglers, slow, 3), "");
  EXPECT_EQ(told(stragglers, even), "");
  EXPECT_NE(told(stragglers, slow), "");
}

}  // namespace
}  // namespace zero::train
