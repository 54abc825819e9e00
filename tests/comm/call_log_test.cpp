#include "zero/comm/call_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/group.h"

namespace zero::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// One call of each kind, and all-gathers of two sizes.
void communicate(Group& group) {
  const int64_t n = group.size();
  const auto of = [](int64_t numel) { return torch::ones({numel}, torch::kFloat); };
  auto whole = of(8 * n);
  group.all_gather(whole, of(8), "a").wait();
  group.all_gather(whole, of(8), "b").wait();
  auto larger = of(16 * n);
  group.all_gather(larger, of(16), "c").wait();
  auto part = of(8);
  group.reduce_scatter(part, whole, "d").wait();
  group.all_reduce(whole, "e").wait();
  group.barrier("f");
}

TEST(CallLog, CountsWhatTheTrafficCounts) {
  for (const int ranks : {1, 2}) {
    run_as_threads(ranks, [&](std::shared_ptr<Group> group) {
      communicate(*group);
      auto& log = *group->accounts().calls;
      EXPECT_THAT(log.times(), IsEmpty()) << "off";
      log.start();
      group->traffic().reset();
      communicate(*group);
      log.stop();
      std::map<Collective, int64_t> calls;
      std::vector<int64_t> gathered;
      for (const auto& times : log.times()) {
        calls[times.collective] += times.calls;
        EXPECT_GE(times.nanoseconds, 0);
        if (times.collective == Collective::all_gather) gathered.push_back(times.message);
      }
      for (size_t i = 0; i < kCollectives; ++i) {
        const auto collective = static_cast<Collective>(i);
        EXPECT_EQ(calls[collective], group->traffic().count(collective).calls) << name(collective);
      }
      EXPECT_THAT(gathered, ElementsAre(32 * ranks, 64 * ranks)) << "bytes of whole arrays";
    });
  }
}

TEST(CallLog, TellsAndCountsWhatIsWanted) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    std::vector<std::string> told;
    auto& log = *group->accounts().calls;
    log.start([](Collective collective) { return collective == Collective::all_gather; },
              [&](const CallTime& call) { told.emplace_back(call.label); });
    communicate(*group);
    log.stop();
    EXPECT_THAT(told, ElementsAre("a", "b", "c"));
    ASSERT_EQ(log.times().size(), 2u);
    EXPECT_EQ(log.times()[0].calls, 2);
  });
}

TEST(CallLog, TellsSubgroupsApart) {
  run_as_threads(4, [](std::shared_ptr<Group> group) {
    const int first = group->rank() / 2 * 2;
    const std::vector<int> pair{first, first + 1};
    const auto part = group->subgroup(pair);
    auto& log = *group->accounts().calls;
    log.start();
    for (auto* each : {group.get(), part.get()}) {
      auto whole = torch::ones({16}, torch::kFloat);
      each->all_reduce(whole).wait();
    }
    log.stop();
    std::vector<int> ranks;
    for (const auto& times : log.times()) {
      if (times.collective != Collective::all_reduce) continue;
      EXPECT_EQ(times.message, 64);
      EXPECT_EQ(times.calls, 1);
      EXPECT_DOUBLE_EQ(times.bus_bandwidth(),
                       times.algorithm_bandwidth() * 2 * (times.ranks - 1) / times.ranks);
      ranks.push_back(times.ranks);
    }
    EXPECT_THAT(ranks, ElementsAre(2, 4));
  });
}

TEST(CallTimes, HaveBandwidthsOfTheirKind) {
  CallTimes times{.collective = Collective::all_reduce,
                  .ranks = 4,
                  .message = 4'000'000,
                  .calls = 2,
                  .nanoseconds = 1'000'000};
  EXPECT_DOUBLE_EQ(times.average_ms(), 0.5);
  EXPECT_DOUBLE_EQ(times.algorithm_bandwidth(), 8);
  EXPECT_DOUBLE_EQ(times.bus_bandwidth(), 12);
  times.collective = Collective::reduce_scatter;
  EXPECT_DOUBLE_EQ(times.bus_bandwidth(), 6);
  times.collective = Collective::broadcast;
  EXPECT_DOUBLE_EQ(times.bus_bandwidth(), 8);
  times.in_place = true;
  EXPECT_EQ(times.algorithm_bandwidth(), 0);
  EXPECT_EQ(CallTimes{}.average_ms(), 0);
}

}  // namespace
}  // namespace zero::comm
