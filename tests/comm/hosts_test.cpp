// A group on several hosts: the bits of one host, the bytes of its formula, and errors by name.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/comm/world.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/comm/link_clock.h"

namespace zero::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Numbers whose sums depend on their order.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype) {
  auto tensor = at::empty({numel}, at::kFloat);
  auto* out = tensor.data_ptr<float>();
  uint64_t state = 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(rank + 1);
  for (int64_t i = 0; i < numel; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto bits = static_cast<int64_t>(state >> 33) - (int64_t{1} << 30);
    out[i] = static_cast<float>(bits) * 1.37e-7F * static_cast<float>(1 + (i % 7) * (rank + 3));
  }
  return tensor.to(dtype);
}

// Returns what every rank has in the end, by rank.
std::vector<at::Tensor> reduced(const std::function<void(const std::function<void(Group&)>&)>& run,
                                int ranks, at::ScalarType dtype, at::ScalarType into, bool all) {
  std::vector<at::Tensor> results(static_cast<size_t>(ranks));
  constexpr int64_t kSlice = 300'007;
  run([&](Group& group) {
    auto input = group.empty(kSlice * ranks, dtype, Category::communication);
    input.copy_(values(group.rank(), input.numel(), dtype));
    auto& result = results[static_cast<size_t>(group.rank())];
    if (all) {
      group.all_reduce(input, "sum").wait();
      result = input.clone();
    } else {
      result = at::empty({kSlice}, into);
      group.reduce_scatter(result, input, "sum").wait();
    }
  });
  return results;
}

class Hosts : public ::testing::TestWithParam<World> {
 protected:
  static int ranks() { return GetParam().hosts * GetParam().local_size; }
  static void on_hosts(const std::function<void(Group&)>& body) {
    run_as_hosts(GetParam().hosts, GetParam().local_size,
                 [&](std::shared_ptr<Group> group) { body(*group); });
  }
};

TEST_P(Hosts, SumsHaveTheBitsOfOneHostThatAddsInBlocks) {
  const auto on_one_host = [&](const std::function<void(Group&)>& body) {
    GroupOptions options;
    options.sum_block = GetParam().local_size;
    run_as_threads(
        ranks(), [&](std::shared_ptr<Group> group) { body(*group); }, options);
  };
  for (const bool all : {false, true}) {
    for (const auto& [dtype, into] :
         std::vector<std::pair<at::ScalarType, at::ScalarType>>{{at::kFloat, at::kFloat},
                                                                {at::kBFloat16, at::kBFloat16},
                                                                {at::kBFloat16, at::kFloat},
                                                                {at::kHalf, at::kHalf}}) {
      if (all && dtype != into) continue;
      const auto hosts = reduced(&Hosts::on_hosts, ranks(), dtype, into, all);
      const auto one = reduced(on_one_host, ranks(), dtype, into, all);
      for (size_t r = 0; r < hosts.size(); ++r)
        EXPECT_TRUE(at::equal(hosts[r], one[r])) << "rank " << r << ", " << dtype;
    }
  }
}

TEST_P(Hosts, KnowWhereTheirRanksAre) {
  on_hosts([&](Group& group) {
    EXPECT_EQ(group.topology().hosts, GetParam().hosts);
    EXPECT_EQ(group.topology().host, group.rank() / GetParam().local_size);
    EXPECT_EQ(group.local_size(), GetParam().local_size);
    EXPECT_EQ(group.local_rank(), group.rank() % GetParam().local_size);
  });
}

// With two levels a host's link carries (H-1)/H of an array once, whatever its ranks.
TEST_P(Hosts, SendNoMoreOverTheirLinksThanTheyMust) {
  const auto [hosts, local_size] = GetParam();
  on_hosts([&, hosts = hosts, local_size = local_size](Group& group) {
    constexpr int64_t kSlice = 100'000;
    auto whole = group.empty(kSlice * group.size(), at::kBFloat16, Category::communication);
    whole.zero_();
    auto slice = whole.narrow(0, group.rank() * kSlice, kSlice);
    group.all_gather(whole, slice, "gather").wait();
    EXPECT_EQ(group.traffic().count(Collective::all_gather).link_bytes, (hosts - 1) * kSlice * 2);
    auto sum = at::empty({kSlice}, at::kBFloat16);
    group.reduce_scatter(sum, whole, "scatter").wait();
    EXPECT_EQ(group.traffic().count(Collective::reduce_scatter).link_bytes,
              (hosts - 1) * kSlice * (local_size == 1 ? 2 : 4));
  });
}

// The array has more chunks than may be under way at a time, and several calls run at once.
TEST_P(Hosts, AddLongArraysThroughAFewChunks) {
  on_hosts([&](Group& group) {
    constexpr int64_t kSlice = 3'000'000;
    auto first = group.empty(kSlice * group.size() + 1, at::kFloat, Category::communication);
    auto second = group.empty(kSlice * group.size(), at::kBFloat16, Category::communication);
    auto slice = group.empty(kSlice, at::kBFloat16, Category::communication);
    first.fill_(group.rank() + 1);
    second.fill_(group.rank() + 1);
    auto one = group.all_reduce(first, "all");
    auto two = group.reduce_scatter(slice, second, "slices");
    two.wait();
    one.wait();
    const auto sum = static_cast<float>(group.size() * (group.size() + 1)) / 2;
    EXPECT_TRUE(at::equal(first, at::full_like(first, sum)));
    EXPECT_TRUE(at::equal(slice, at::full_like(slice, sum)));
  });
}

// The clock is looked at between two looks at the link, and around both.
LinkTimes link_during(Group& group, const std::function<void()>& body) {
  using Clock = std::chrono::steady_clock;
  const auto ms = [](Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
  };
  const auto before = Clock::now();
  const auto first = group.link_times().value();
  const auto begin = Clock::now();
  body();
  const auto end = Clock::now();
  const auto last = group.link_times().value();
  const auto after = Clock::now();
  const auto link = last - first;
  constexpr double kRounding = 1e-3;
  EXPECT_GE(link.total(), ms(end - begin) - kRounding);
  EXPECT_LE(link.total(), ms(after - before) + kRounding);
  return link;
}

TEST_P(Hosts, KnowWhereTheirLinksStandStill) {
  constexpr std::chrono::milliseconds kSleep(120);
  const double most = 0.6 * static_cast<double>(kSleep.count());
  on_hosts([&](Group& group) {
    const auto computing = link_during(group, [&] { std::this_thread::sleep_for(kSleep); });
    EXPECT_GT(computing.nothing_to_send, most);

    auto sum = at::empty({100'000}, at::kFloat);
    sum.fill_(1);
    group.barrier();
    const bool late = group.topology().host == 1;
    const auto waiting = link_during(group, [&] {
      if (late) std::this_thread::sleep_for(kSleep);
      group.all_reduce(sum, "late").wait();
    });
    EXPECT_GT(late ? waiting.nothing_to_send : waiting.peer_late, most);

    // Rails between threads take no time, so nearly all of it is packing.
    auto packed = at::empty({500'000}, at::kFloat);
    auto all = at::empty({packed.numel() * group.size()}, at::kFloat);
    packed.fill_(1);
    group.barrier();
    const auto packing = link_during(
        group, [&] { group.all_gather(all, packed, "packed", LinkWire{.packed = true}).wait(); });
    EXPECT_GT(packing.processor, 0);
    EXPECT_LT(packing.nothing_to_send, packing.total());
  });
}

TEST(LinkTimes, CountAsBusyNoLongerThanTheMeasuredSpeedSays) {
  LinkClock clock;
  clock.set_speed({.bandwidth = 1e6, .latency = 1e-3});
  const auto chunk = [&](int64_t bytes) {
    const auto before = clock.times();
    {
      const LinkClock::CallScope call(clock);
      const LinkClock::WaitScope wait(clock, LinkClock::Wait::arrival, bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
    }
    return clock.times() - before;
  };
  const auto late = chunk(10'000);
  EXPECT_NEAR(late.busy, 2 * 10 + 1, 0.1);
  EXPECT_GT(late.peer_late, 60 - 22);
  EXPECT_EQ(chunk(int64_t{1} << 40).peer_late, 0);
  EXPECT_EQ(chunk(0).peer_late, 0) << "whole messages come as fast as they can";
}

TEST(LinkTimes, SpeedIsMeasuredOnceAndAgreed) {
  std::mutex mutex;
  std::set<std::pair<double, double>> speeds;
  run_as_hosts(2, 2, [&](std::shared_ptr<Group> group) {
    EXPECT_FALSE(group->link_speed());
    const auto speed = group->measure_link();
    ASSERT_TRUE(speed);
    EXPECT_GT(speed->bandwidth, 1e6);
    EXPECT_GT(speed->latency, 0);
    EXPECT_EQ(group->link_speed(), speed);
    EXPECT_EQ(group->measure_link(), speed);
    EXPECT_EQ(group->traffic().total().link_bytes, 0) << "it is counted as control";
    const int first = group->topology().host * 2;
    EXPECT_FALSE(group->subgroup(std::vector<int>{first, first + 1})->measure_link());
    const std::lock_guard lock(mutex);
    speeds.insert({speed->bandwidth, speed->latency});
  });
  EXPECT_EQ(speeds.size(), 1U);
}

TEST(LinkTimes, AreThoseOfSeveralHostsOnly) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    EXPECT_FALSE(group->link_times());
    EXPECT_FALSE(group->measure_link());
  });
  EXPECT_FALSE(single()->link_times());
}

TEST_P(Hosts, ControlCallsGoBesideTensors) {
  on_hosts([&](Group& group) {
    auto tensor = group.empty(3'000'000, at::kFloat, Category::communication);
    tensor.fill_(group.rank() + 1);
    for (int k = 0; k < 3; ++k) {
      auto work = group.all_reduce(tensor, "large");
      auto flag = at::empty({1}, at::kFloat);
      flag.fill_(1);
      group.all_reduce_control(flag, "flag");
      EXPECT_EQ(flag.item<float>(), static_cast<float>(group.size()));
      auto all = at::empty({group.size() * 3}, at::kLong);
      auto mine = at::empty({3}, at::kLong);
      mine.fill_(group.rank());
      group.all_gather_control(all, mine, "present");
      for (int64_t i = 0; i < all.numel(); ++i) EXPECT_EQ(all.data_ptr<int64_t>()[i], i / 3);
      group.barrier("between");
      work.wait();
    }
  });
}

TEST_P(Hosts, NameWhoCallsSomethingElse) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const auto body = [&](std::shared_ptr<Group> group) {
    auto tensor = group->empty(200'000, at::kFloat, Category::communication);
    tensor.fill_(1);
    try {
      group->all_reduce(tensor, group->rank() == group->size() - 1 ? "another" : "one").wait();
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  };
  run_as_hosts(GetParam().hosts, GetParam().local_size, body);
  ASSERT_EQ(messages.size(), static_cast<size_t>(ranks()));
  int full = 0;
  for (const auto& message : messages) {
    if (message.find("'another'") != std::string::npos &&
        message.find("'one'") != std::string::npos)
      ++full;
  }
  EXPECT_GE(full, 1);
}

TEST_P(Hosts, ARanksFailureIsEveryRanksFailure) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const auto body = [&](std::shared_ptr<Group> group) {
    group->barrier("start");
    auto tensor = group->empty(2'000'000, at::kFloat, Category::communication);
    tensor.fill_(1);
    if (group->rank() == 1) throw Error("the disk of rank 1 is full");
    try {
      for (int k = 0; k < 100; ++k) group->all_reduce(tensor, "again").wait();
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  };
  const auto thrown =
      zero::message_of<Error>([&] { run_as_hosts(GetParam().hosts, GetParam().local_size, body); });
  EXPECT_THAT(thrown, HasSubstr("the disk of rank 1 is full"));
  EXPECT_EQ(messages.size(), static_cast<size_t>(ranks() - 1));
}

// The subgroups are blocks of a host's ranks, and the ranks of one place on all hosts. Each host's
// window has what all ranks of all hosts have published, once for all its ranks.
TEST_P(Hosts, HaveAWindowEachThatShowsWhatAllPublish) {
  constexpr int64_t kNumel = 70'001;  // a slice's elements
  constexpr int64_t kSlots = 3;
  for (const bool quantised : {false, true}) {
    on_hosts([&](Group& group) {
      const int64_t slot_bytes = ranks() * kNumel * 4;
      auto window = group.window(kSlots * slot_bytes, kSlots, Category::parameters);
      EXPECT_EQ(group.ledger()->usage(Category::parameters).current,
                kSlots * slot_bytes / group.local_size());
      const auto place = [&](const at::Tensor& array, int64_t slot) {
        return array.narrow(0, slot * slot_bytes, slot_bytes).view(at::kFloat);
      };
      const auto apart = at::empty({kNumel}, at::kFloat);
      group.traffic().reset();
      constexpr uint64_t kEpochs = 4;
      for (uint64_t epoch = 1; epoch <= kEpochs; ++epoch) {
        const auto seed = [&](int rank) { return static_cast<int>(10 * epoch) + rank; };
        for (int64_t slot = 0; slot < kSlots; ++slot) {
          const auto whole = place(window->memory(), slot);
          const auto own = whole.narrow(0, group.rank() * kNumel, kNumel);
          if (quantised && slot > 0) window->settle();  // `apart` serves all slots
          const auto slice = quantised ? apart : own;
          slice.copy_(values(seed(group.rank()), kNumel, at::kFloat));
          std::optional<LinkWire> wire;
          if (quantised) wire = LinkWire{.quantisation = {WireFormat::int8, 128}};
          window->publish(slot, epoch,
                          {.whole = whole, .slice = slice, .label = "unit", .wire = wire});
        }
        for (int64_t slot = 0; slot < kSlots; ++slot) {
          for (int rank = 0; rank < ranks(); ++rank) {
            window->wait(slot, rank, epoch, "unit");
            const auto read = place(window->view(), slot).narrow(0, rank * kNumel, kNumel);
            const auto expected = values(seed(rank), kNumel, at::kFloat);
            if (!quantised) {
              EXPECT_TRUE(at::equal(read, expected)) << "rank " << rank << ", epoch " << epoch;
            } else {
              EXPECT_LT((read - expected).abs().max().item<float>(),
                        expected.abs().max().item<float>() / 200);
              EXPECT_FALSE(at::equal(read, expected)) << "what the messages say, on the owner too";
            }
          }
        }
        window->settle();
        group.barrier();  // nobody reads this epoch any more
      }
      const int64_t slice_bytes =
          quantised ? wire_bytes({WireFormat::int8, 128}, kNumel) : kNumel * 4;
      // Values go in chunks, whose last blocks are whole as the message's own are.
      EXPECT_EQ(group.traffic().count(Collective::all_gather).link_bytes,
                static_cast<int64_t>(kEpochs) * kSlots * (GetParam().hosts - 1) * slice_bytes);
      EXPECT_THAT(zero::message_of<CommError>([&] { window->publish(0, kEpochs + 1); }),
                  AllOf(HasSubstr("Slot 0"), HasSubstr("without its slices")));
      EXPECT_THAT(zero::message_of<CommError>([&] { window->publish(kSlots, 1); }),
                  HasSubstr("has no slot 3"));
      group.barrier();
    });
  }
}

TEST_P(Hosts, WindowsWaitNoLongerThanTheirPublishersLive) {
  on_hosts([&](Group& group) {
    auto window = group.window(int64_t{8} * ranks(), 1, Category::parameters);
    const int last = ranks() - 1;
    if (group.rank() == last) {
      group.abandon("it has had enough");
      return;
    }
    const auto whole = window->memory().view(at::kFloat);
    // The message depends on who notices first, since no watch looks after ranks that are threads.
    EXPECT_THROW(
        {
          window->publish(0, 1,
                          {.whole = whole,
                           .slice = whole.narrow(0, int64_t{2} * group.rank(), 2),
                           .label = "unit"});
          for (int rank = 0; rank < ranks(); ++rank) window->wait(0, rank, 1, "unit");
        },
        CommError);
  });
}

TEST_P(Hosts, HaveGroupsOfSomeOfTheirRanks) {
  const auto [hosts, local_size] = GetParam();
  on_hosts([&, hosts = hosts, local_size = local_size](Group& group) {
    std::vector<int> block;
    std::vector<int> across;
    for (int i = 0; i < local_size; ++i) block.push_back(group.topology().host * local_size + i);
    for (int h = 0; h < hosts; ++h) across.push_back(h * local_size + group.local_rank());
    for (const auto& ranks : {block, across}) {
      const auto some = group.subgroup(ranks);
      ASSERT_EQ(some->size(), static_cast<int>(ranks.size()));
      EXPECT_EQ(ranks[static_cast<size_t>(some->rank())], group.rank());
      auto sum = at::empty({1000}, at::kFloat);
      sum.fill_(group.rank());
      some->all_reduce(sum, "some").wait();
      EXPECT_EQ(sum[999].item<float>(),
                static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), 0)));
    }
    const auto wrong = zero::message_of<CommError>([&] { group.subgroup(std::vector<int>{99}); });
    EXPECT_THAT(wrong, HasSubstr("they are 99"));
  });
}

// The failure is in a group of one host's ranks among them.
TEST_P(Hosts, AreNamedByTheRanksOfTheJobInWindows) {
  const auto [hosts, local_size] = GetParam();
  if (local_size < 2) return;
  const int awaited = hosts * local_size - 1;  // the last rank of the last host
  std::latch timed_out(1);
  run_as_hosts(hosts, local_size,
               [&, local_size = local_size](std::shared_ptr<Group> group) {
                 std::vector<int> of_host(static_cast<size_t>(local_size));
                 std::iota(of_host.begin(), of_host.end(), group->topology().host * local_size);
                 const auto some = group->subgroup(of_host);
                 const auto window = some->window(64, 1, Category::parameters);
                 if (group->rank() == awaited - 1) {
                   EXPECT_THAT(zero::message_of<CommError>(
                                   [&] { window->wait(0, local_size - 1, 1, "unit"); }),
                               HasSubstr("(rank " + std::to_string(awaited) + " is at 0)"));
                   timed_out.count_down();
                 }
                 timed_out.wait();
               },
               {.timeout = std::chrono::milliseconds(300)});
}

TEST_P(Hosts, WorksMayOutliveTheirGroup) {
  std::mutex mutex;
  std::vector<Work> works;
  run_as_hosts(GetParam().hosts, GetParam().local_size, [&](std::shared_ptr<Group> group) {
    auto tensor = at::empty({100'000}, at::kFloat);
    tensor.fill_(1);
    auto work = group->all_reduce(tensor, "last");
    const std::lock_guard lock(mutex);
    works.push_back(std::move(work));
  });
  for (auto& work : works) work.wait();
  EXPECT_EQ(works.size(), static_cast<size_t>(ranks()));
}

INSTANTIATE_TEST_SUITE_P(Worlds, Hosts,
                         ::testing::Values(World{2, 1}, World{2, 2}, World{3, 1}, World{3, 2}),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace zero::comm
