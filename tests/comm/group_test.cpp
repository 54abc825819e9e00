// Tests what Group adds to a transport: ledger, exact traffic, wait clock, a group of one.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/group.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

constexpr int64_t kStaging = int64_t{4} << 20;

TEST(Memory, IsOnTheLedgerWhileItsStorageLives) {
  for (const int world : {1, 3}) {
    run_as_threads(world, [](std::shared_ptr<Group> group) {
      const auto& ledger = *group->ledger();
      {
        auto a = group->empty(1000, at::kFloat, Category::gradients);
        auto b = group->empty(3, at::kBFloat16, Category::parameters);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data_ptr()) % 64, 0u);
        EXPECT_EQ(a.numel(), 1000);
        EXPECT_EQ(b.scalar_type(), at::kBFloat16);
        EXPECT_EQ(ledger.usage(Category::gradients).current, 4000);
        EXPECT_EQ(ledger.usage(Category::parameters).current, 6);
        auto view = a.narrow(0, 10, 5);
        a.reset();
        EXPECT_EQ(ledger.usage(Category::gradients).current, 4000) << "a view holds the storage";
      }
      EXPECT_EQ(ledger.total().current, 0);
      EXPECT_EQ(ledger.total().peak, 4006);
      EXPECT_EQ(group->empty(0, at::kFloat, Category::gradients).numel(), 0);
      EXPECT_EQ(ledger.total().current, 0);
    });
  }
}

TEST(Memory, OutlivesItsGroup) {
  for (const int world : {1, 2}) {
    std::vector<at::Tensor> kept(static_cast<size_t>(world));
    std::vector<std::shared_ptr<Ledger>> ledgers(static_cast<size_t>(world));
    run_as_threads(world, [&](std::shared_ptr<Group> group) {
      const auto rank = static_cast<size_t>(group->rank());
      kept[rank] = group->empty(100, at::kFloat, Category::optimizer).fill_(group->rank());
      ledgers[rank] = group->ledger();
    });
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_EQ(kept[static_cast<size_t>(rank)].sum().item<float>(), 100 * rank);
      EXPECT_EQ(ledgers[static_cast<size_t>(rank)]->total().current, 400);
      kept[static_cast<size_t>(rank)].reset();
      EXPECT_EQ(ledgers[static_cast<size_t>(rank)]->total().current, 0);
    }
  }
}

TEST(Memory, BeyondTheMachineIsAnError) {
  for (const int world : {1, 2}) {
    run_as_threads(world, [](std::shared_ptr<Group> group) {
      EXPECT_THROW(group->empty(int64_t{1} << 44, at::kFloat, Category::gradients), OutOfMemory);
      EXPECT_EQ(group->ledger()->total().current, 0);
      auto fits = group->empty(1000, at::kFloat, Category::gradients).fill_(1);
      group->all_reduce(fits).wait();
    });
  }
}

TEST(Memory, OfStagingIsChargedOnceAndOnlyWhenNeeded) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto shared = group->empty(100'000, at::kFloat, Category::gradients);
    group->all_reduce(shared).wait();
    EXPECT_EQ(group->ledger()->usage(Category::communication).current, 0);
    auto own = at::zeros({100'000});
    group->all_reduce(own).wait();
    group->all_reduce(own).wait();
    EXPECT_EQ(group->ledger()->usage(Category::communication).current, kStaging);
  });
}

struct Expected {
  Collective collective;
  int64_t logical;
  int64_t copied;
};

void expect_traffic(Group& group, const std::vector<Expected>& all) {
  TrafficCount sum;
  for (const auto& [collective, logical, copied] : all) {
    const auto count = group.traffic().count(collective);
    EXPECT_EQ(count.calls, 1) << name(collective);
    EXPECT_EQ(count.logical_bytes, logical) << name(collective) << " on rank " << group.rank();
    EXPECT_EQ(count.copied_bytes, copied) << name(collective) << " on rank " << group.rank();
    sum.logical_bytes += logical;
    sum.copied_bytes += copied;
  }
  EXPECT_EQ(group.traffic().total().calls, static_cast<int64_t>(all.size()));
  EXPECT_EQ(group.traffic().total().logical_bytes, sum.logical_bytes);
  EXPECT_EQ(group.traffic().total().copied_bytes, sum.copied_bytes);
}

TEST(Traffic, IsExactForTensorsInTheArena) {
  constexpr int64_t kSlice = 120'000;  // elements
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    const bool root = group->rank() == 1;
    const int64_t slice_bytes = kSlice * 4;
    auto whole = group->empty(3 * kSlice, at::kFloat, Category::gradients).zero_();
    auto other = group->empty(3 * kSlice, at::kFloat, Category::gradients).zero_();
    auto slice = whole.narrow(0, group->rank() * kSlice, kSlice);
    group->all_gather(whole, slice).wait();
    group->reduce_scatter(slice, whole).wait();
    group->all_reduce(whole).wait();
    group->broadcast(whole, 1).wait();
    group->all_to_all(other, whole).wait();
    // The rank shares of an all-reduce are whole cache lines: the last one is shorter.
    const auto share = (3 * slice_bytes / 3 / 64 + 1) * 64;
    const auto mine = std::min(3 * slice_bytes, (group->rank() + 1) * share) -
                      std::min(3 * slice_bytes, group->rank() * share);
    expect_traffic(*group,
                   {{Collective::all_gather, 2 * slice_bytes, 2 * slice_bytes},
                    {Collective::reduce_scatter, 2 * slice_bytes, 2 * slice_bytes},
                    {Collective::all_reduce, 4 * slice_bytes, 4 * mine},
                    {Collective::broadcast, root ? 3 * slice_bytes : 0, root ? 0 : 3 * slice_bytes},
                    {Collective::all_to_all, 2 * slice_bytes, 3 * slice_bytes}});
    EXPECT_EQ(group->traffic().count(Collective::control).calls, 0);
    group->traffic().reset();
    EXPECT_EQ(group->traffic().total().calls, 0);
  });
}

TEST(Traffic, CountsWhatIsStagedAsCopied) {
  constexpr int64_t kSlice = 500'000;  // several chunks
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    const bool root = group->rank() == 1;
    const int64_t slice_bytes = kSlice * 2;
    auto whole = at::zeros({3 * kSlice}, at::kBFloat16);
    auto other = at::zeros({3 * kSlice}, at::kBFloat16);
    auto slice = at::zeros({kSlice}, at::kBFloat16);
    auto wide = at::zeros({kSlice});
    group->all_gather(whole, slice).wait();
    group->reduce_scatter(wide, whole).wait();
    group->broadcast(whole, 1).wait();
    group->all_to_all(other, whole).wait();
    expect_traffic(*group, {{Collective::all_gather, 2 * slice_bytes, 4 * slice_bytes},
                            {Collective::reduce_scatter, 2 * slice_bytes, 4 * slice_bytes},
                            {Collective::broadcast, root ? 3 * slice_bytes : 0, 3 * slice_bytes},
                            {Collective::all_to_all, 2 * slice_bytes, 5 * slice_bytes}});
  });
}

TEST(Traffic, CountsWhatLeavesForOtherHostsBesideTheRest) {
  Traffic traffic;
  traffic.add(Collective::all_gather, 10, 20);
  traffic.add_link(Collective::all_gather, 3);
  traffic.add_link(Collective::all_gather, 4);
  traffic.add_link(Collective::reduce_scatter, 5);
  traffic.add_link(Collective::control, 100);
  EXPECT_EQ(traffic.count(Collective::all_gather).calls, 1);
  EXPECT_EQ(traffic.count(Collective::all_gather).logical_bytes, 10);
  EXPECT_EQ(traffic.count(Collective::all_gather).copied_bytes, 20);
  EXPECT_EQ(traffic.count(Collective::all_gather).link_bytes, 7);
  EXPECT_EQ(traffic.count(Collective::control).link_bytes, 100);
  EXPECT_EQ(traffic.total().link_bytes, 7 + 5);
  traffic.reset();
  EXPECT_EQ(traffic.total().link_bytes, 0);
}

TEST(Traffic, OfControlIsKeptApart) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto flag = at::full({4}, 1.0f);
    auto all = at::zeros({8});
    group->all_reduce_control(flag, "overflow");
    group->all_gather_control(all, flag, "hash");
    group->barrier("step");
    EXPECT_EQ(all[7].item<float>(), 2);
    const auto control = group->traffic().count(Collective::control);
    EXPECT_EQ(control.calls, 3);
    EXPECT_EQ(control.logical_bytes, 16 + 16);
    EXPECT_EQ(group->traffic().total().calls, 0);
    EXPECT_EQ(group->traffic().total().logical_bytes, 0);
    EXPECT_EQ(group->traffic().total().copied_bytes, 0);
  });
}

TEST(WaitClock, CountsTheTimeThatPeersTake) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto tensor = at::zeros({10});
    group->barrier();
    const auto before = group->wait_ms();
    if (group->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    group->all_reduce(tensor).wait();
    if (group->rank() == 0) {
      EXPECT_GE(group->wait_ms() - before, 30);
    }
  });
}

TEST(Group, KnowsThatAllItsRanksAreOnThisHost) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    EXPECT_EQ(group->size(), 3);
    EXPECT_EQ(group->local_rank(), group->rank());
    EXPECT_EQ(group->local_size(), 3);
  });
}

TEST(Topology, IsHostsTimesRanksAHost) {
  const std::vector<int64_t> hosts{7, 7, 7, 5, 5, 5};
  const auto fourth = Topology::of(hosts, 4);
  EXPECT_EQ(fourth.hosts, 2);
  EXPECT_EQ(fourth.host, 1);
  EXPECT_EQ(fourth.local_size, 3);
  EXPECT_EQ(fourth.local_rank, 1);
  EXPECT_TRUE(fourth.regular);
  EXPECT_EQ(Topology::of(hosts, 0).host, 0);
  const auto one = Topology::of(std::vector<int64_t>{3, 3}, 1);
  EXPECT_EQ(one.hosts, 1);
  EXPECT_EQ(one.local_rank, 1);
  EXPECT_TRUE(one.regular);
}

TEST(Topology, IsIrregularWhereHostsDifferOrRanksAlternate) {
  const auto uneven = Topology::of(std::vector<int64_t>{1, 1, 2}, 2);
  EXPECT_FALSE(uneven.regular);
  EXPECT_EQ(uneven.local_size, 1);
  EXPECT_EQ(uneven.host, 1);
  const auto alternating = Topology::of(std::vector<int64_t>{1, 2, 1, 2}, 3);
  EXPECT_FALSE(alternating.regular);
  EXPECT_EQ(alternating.hosts, 2);
  EXPECT_EQ(alternating.local_rank, 1);
  EXPECT_EQ(alternating.local_size, 2);
}

TEST(Group, SharesItsAccountsWithAnotherOfItsRank) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    const auto alone = single(group->accounts());
    const auto tensor = alone->empty(10, at::kFloat, Category::gradients);
    EXPECT_EQ(group->ledger()->usage(Category::gradients).current, 40);
    EXPECT_EQ(&group->traffic(), &alone->traffic());
  });
}

TEST(GroupOfOne, ExchangesRecordsForNothing) {
  const auto group = single();
  EXPECT_EQ(gather_records(*group, 5, "numbers"), std::vector<int>{5});
  EXPECT_EQ(first_failure(*group, true, "failures"), 0);
  EXPECT_EQ(group->traffic().count(Collective::control).calls, 0);
}

TEST(GroupOfOne, CopiesAndCountsNoBytes) {
  auto group = single();
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  EXPECT_EQ(group->local_rank(), 0);
  EXPECT_EQ(group->local_size(), 1);
  auto input = group->empty(5, at::kFloat, Category::gradients).fill_(3);
  auto output = group->empty(5, at::kFloat, Category::gradients).zero_();
  auto low = at::full({5}, 1.5, at::kBFloat16);
  const auto version = output._version();
  group->all_gather(output, input).wait();
  EXPECT_EQ(output[4].item<float>(), 3);
  group->reduce_scatter(output, low).wait();
  EXPECT_EQ(output[4].item<float>(), 1.5);
  EXPECT_EQ(output._version(), version) << "a collective moves no version counter";
  group->all_to_all(output, input).wait();
  group->all_reduce(output).wait();
  group->broadcast(output, 0).wait();
  group->barrier();
  EXPECT_EQ(output[4].item<float>(), 3);
  EXPECT_EQ(group->traffic().total().calls, 5);
  EXPECT_EQ(group->traffic().total().logical_bytes, 0);
  EXPECT_EQ(group->traffic().total().copied_bytes, 0);
  EXPECT_THROW(group->broadcast(output, 1), CommError);
  EXPECT_THROW(group->all_gather(output, at::zeros({4})), CommError);
  EXPECT_THROW(group->all_gather(low, output), CommError) << "another dtype";
  EXPECT_THROW(group->all_to_all(low, output), CommError) << "another dtype";
  EXPECT_THROW(group->all_gather(output, at::zeros({5}, at::kInt)), CommError);
  EXPECT_THROW(group->reduce_scatter(at::zeros({5}, at::kInt), low), CommError);
}

class Reductions : public ::testing::TestWithParam<int64_t> {};

TEST_P(Reductions, EqualThePlainSumInRankOrderBitForBit) {
  const int64_t total = 3 * GetParam();
  for (const bool shared : {true, false}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      std::vector<at::Tensor> inputs;
      std::vector<const void*> pointers;
      at::manual_seed(7);
      for (int rank = 0; rank < 3; ++rank)
        inputs.push_back(at::randn({total}).mul_(1000).to(dtype));
      for (const auto& input : inputs) pointers.push_back(input.const_data_ptr());
      auto expected = at::empty({total}, dtype);
      auto expected_wide = at::empty({total});
      sum_reference(expected.data_ptr(), dtype, pointers, dtype, total);
      sum_reference(expected_wide.data_ptr(), at::kFloat, pointers, dtype, total);
      run_as_threads(3, [&](std::shared_ptr<Group> group) {
        const auto n = total / 3;
        const auto rank = group->rank();
        const auto make = [&](int64_t numel, at::ScalarType type) {
          return shared ? group->empty(numel, type, Category::gradients) : at::empty({numel}, type);
        };
        auto input = make(total, dtype);
        input.copy_(inputs[static_cast<size_t>(rank)]);
        auto narrow = make(n, dtype);
        group->reduce_scatter(narrow, input).wait();
        EXPECT_TRUE(at::equal(narrow, expected.narrow(0, rank * n, n)));
        auto wide = make(n, at::kFloat);
        group->reduce_scatter(wide, input).wait();
        EXPECT_TRUE(at::equal(wide, expected_wide.narrow(0, rank * n, n)));
        for (const int64_t numel : {total, int64_t{1001}, int64_t{10}}) {  // large, small, tiny
          auto all = make(numel, dtype);
          all.copy_(inputs[static_cast<size_t>(rank)].narrow(0, 0, numel));
          group->all_reduce(all).wait();
          EXPECT_TRUE(at::equal(all, expected.narrow(0, 0, numel)));
        }
      });
    }
  }
}

// Reductions of one piece and of several, which are added by whichever rank has time. The last ones
// are so large that they are written past the caches.
INSTANTIATE_TEST_SUITE_P(Slices, Reductions, ::testing::Values(10'007, 300'007, 2'200'003));

// Peers cannot write a tensor outside the arena, so its own rank adds it alone.
TEST(Collectives, OfTensorsInTheArenaMayWriteOutsideIt) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    constexpr int64_t kNumel = 1'400'003;
    auto input = group->empty(3 * kNumel, at::kFloat, Category::gradients).fill_(group->rank());
    auto output = group->rank() == 1 ? group->empty(kNumel, at::kFloat, Category::gradients)
                                     : at::empty({kNumel});
    for (const int first : {0, 1}) {
      input.add_(first);
      group->reduce_scatter(output, input).wait();
      EXPECT_TRUE(at::equal(output, at::full({kNumel}, 3.0f + 3.0f * static_cast<float>(first))));
    }
  });
}

TEST(Collectives, MixTensorsInAndOutOfTheArena) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    constexpr int64_t kNumel = 1'200'000;
    const bool shared = group->rank() == 1;
    const auto make = [&](int64_t numel) {
      return shared ? group->empty(numel, at::kFloat, Category::gradients) : at::empty({numel});
    };
    auto all = make(kNumel).fill_(group->rank() + 1);
    group->all_reduce(all).wait();
    EXPECT_TRUE(at::equal(all, at::full({kNumel}, 6.0f)));
    auto slice = make(kNumel / 3).fill_(group->rank());
    auto gathered = make(kNumel);
    group->all_gather(gathered, slice).wait();
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(gathered.narrow(0, r * kNumel / 3, kNumel / 3),
                            at::full({kNumel / 3}, float(r))));
    }
    group->reduce_scatter(slice, all).wait();
    EXPECT_TRUE(at::equal(slice, at::full({kNumel / 3}, 18.0f)));
    auto exchanged = make(kNumel);
    group->all_to_all(exchanged, gathered).wait();
    EXPECT_TRUE(at::equal(exchanged, at::full({kNumel}, float(group->rank()))));
    for (int root = 0; root < 3; ++root) {
      exchanged.fill_(group->rank() + 10);
      group->broadcast(exchanged, root).wait();
      EXPECT_TRUE(at::equal(exchanged, at::full({kNumel}, float(root + 10))));
    }
  });
}

TEST(Collectives, ThatNobodyWaitsForStillComplete) {
  std::vector<at::Tensor> tensors(2);
  run_as_threads(2, [&](std::shared_ptr<Group> group) {
    auto& tensor = tensors[static_cast<size_t>(group->rank())];
    tensor = group->empty(1000, at::kFloat, Category::gradients).fill_(1);
    group->all_reduce(tensor);
  });
  for (const auto& tensor : tensors) EXPECT_EQ(tensor[999].item<float>(), 2);
}

TEST(Collectives, HoldTheirTensorsUntilTheyAreDone) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto result = group->empty(2000, at::kFloat, Category::gradients);
    Work work;
    {
      auto input = group->empty(1000, at::kFloat, Category::gradients).fill_(group->rank());
      if (group->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      work = group->all_gather(result, input);
    }
    work.wait();
    work.wait();
    EXPECT_TRUE(work.done());
    EXPECT_EQ(result.sum().item<float>(), 1000);
  });
}

TEST(Group, GivesAStoreThatIsItsRanksOwn) {
  run_as_threads(3, [](auto group) {
    const auto store = group->store();
    store->set(std::to_string(group->rank()), "of all");
    for (const char* rank : {"0", "1", "2"}) EXPECT_EQ(store->get(rank).size(), 6U);
    const auto another = group->store();
    EXPECT_FALSE(another->check({"0"}));
    if (group->rank() == 1) return;
    const std::array<int, 2> ranks{0, 2};
    const auto of_two = group->subgroup(ranks)->store();
    EXPECT_FALSE(of_two->check({"0"}));
    of_two->set(std::to_string(group->rank()), "of two");
    EXPECT_EQ(of_two->get("2").size(), 6U);
  });
  EXPECT_THROW(single()->store(), CommError);
}

}  // namespace
}  // namespace zero::comm
