// Holds what the pager gathers, keeps and releases against an independent simulator of the trace.
#include "zero/paging/pager.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <latch>
#include <thread>

#include "tests/paging/local_source.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/weight_use.h"

namespace zero::paging {
namespace {

std::vector<at::Tensor> matrices(std::initializer_list<int64_t> rows) {
  std::vector<at::Tensor> all;
  for (const int64_t r : rows) all.push_back(torch::ones({r, 64}).requires_grad_());
  return all;
}

// Least recently used first, in a list that is searched from the front: bytes gathered for a trace
// of single touches.
std::vector<int64_t> simulate(const std::vector<int64_t>& trace, const partition::Layout& layout,
                              int64_t budget) {
  std::deque<int64_t> present;
  std::vector<int64_t> gathered;
  const auto bytes = [&] {
    int64_t sum = 0;
    for (const int64_t u : present) sum += layout.unit(u).bytes();
    return sum;
  };
  for (const int64_t u : trace) {
    const auto found = std::find(present.begin(), present.end(), u);
    if (found != present.end()) {
      present.erase(found);
    } else {
      while (!present.empty() && bytes() + layout.unit(u).bytes() > budget) present.pop_front();
      gathered.push_back(u);
    }
    present.push_back(u);
    while (!present.empty() && bytes() > budget) present.pop_front();  // after the operator
  }
  return gathered;
}

std::vector<int64_t> units_of(const std::vector<Plan::Gather>& gathers) {
  std::vector<int64_t> units;
  for (const auto& gather : gathers) units.push_back(gather.unit);
  return units;
}

TEST(Pager, GathersTheFirstStepOnDemandAndTheNextByPlan) {
  const std::vector<int64_t> step{0, 1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0, 3, 3};
  for (const int64_t prefetch : {0, 1300}) {
    for (const int64_t budget : {0, 300, 700, 1300, 2600, 100000}) {
      const auto parameters = matrices({1, 3, 2, 5, 1, 4});
      Paged paged(parameters, 1, budget, prefetch);
      auto& gathered = paged.source.gathered;
      const auto run = [&] {
        gathered.clear();
        for (const int64_t p : step) parameters[static_cast<size_t>(p)].sum();
        paged.pager->invalidate();
        paged.pager->end_step();
        return gathered;
      };
      EXPECT_EQ(run(), simulate(step, paged.layout, budget)) << "budget " << budget;
      ASSERT_NE(paged.pager->plan(), nullptr);
      const auto planned = units_of(paged.pager->plan()->gathers);
      EXPECT_LE(planned.size(), simulate(step, paged.layout, budget).size());
      for (int i = 0; i < 3; ++i) EXPECT_EQ(run(), planned) << "budget " << budget;
      EXPECT_LE(paged.ledger->usage(Category::gathered_units).peak,
                std::max<int64_t>(budget, 5 * 64 * 4));
    }
  }
}

// Each gather into memory that is new would have its pages cleared by the system.
TEST(Pager, UnitsOfDifferentSizesTakeTurnsInTheSameMemory) {
  const auto parameters = matrices({40'000, 12'000, 16'000, 12'000});
  Paged paged(parameters, 1, int64_t{8} << 20);  // less than the first
  const auto run = [&] {
    for (const int64_t p : {0, 1, 2, 3, 0, 3, 2, 1}) parameters[static_cast<size_t>(p)].sum();
    paged.pager->invalidate();
    paged.pager->end_step();
  };
  const auto memory = [] { return HostAllocator::instance().usage(); };
  for (int i = 0; i < 2; ++i) run();
  EXPECT_GE(memory().reserved.peak, paged.layout.unit(0).bytes()) << "frames are of the allocator";
  const auto gathered = paged.source.gathered.size();
  const auto before = memory().system_requests;
  for (int i = 0; i < 5; ++i) run();
  EXPECT_GE(paged.source.gathered.size() - gathered, 30U);
  EXPECT_EQ(memory().system_requests, before);
}

TEST(Pager, AChangedStepIsServedAndPlannedAnew) {
  const auto parameters = matrices({2, 2, 2, 2});
  const int64_t two = 2 * 2 * 64 * 4;
  Paged paged(parameters, 1, two);
  auto& gathered = paged.source.gathered;
  const auto run = [&](const std::vector<int64_t>& step) {
    gathered.clear();
    for (const int64_t p : step) parameters[static_cast<size_t>(p)].sum();
    const bool followed = paged.pager->following();
    paged.pager->invalidate();
    paged.pager->end_step();
    EXPECT_EQ(paged.pager->live_bytes(), 0);
    return followed;
  };
  const std::vector<int64_t> a{0, 1, 2, 3, 2, 1, 0};
  const std::vector<int64_t> b{0, 1, 3, 1, 0};
  EXPECT_FALSE(run(a));
  EXPECT_TRUE(run(a));
  EXPECT_EQ(gathered, (std::vector<int64_t>{0, 1, 2, 3, 1, 0})) << "2 stays, 1 is farther";
  EXPECT_FALSE(run(b)) << "a step that is new is noticed";
  EXPECT_TRUE(run(a)) << "and forgets none";
  EXPECT_TRUE(run(b)) << "a known step is found where the traces part";
  EXPECT_EQ(gathered, (std::vector<int64_t>{0, 1, 3, 1, 0})) << "1 went by the first one's plan";
}

TEST(Pager, EvaluationBetweenStepsChangesNoPlan) {
  const auto parameters = matrices({2, 2, 2});
  const int64_t two = 2 * 2 * 64 * 4;
  Paged paged(parameters, 1, two);
  auto& gathered = paged.source.gathered;
  const auto train = [&] {
    for (const int64_t p : {0, 1, 2, 1, 0}) parameters[static_cast<size_t>(p)].sum();
    paged.pager->invalidate();
    paged.pager->end_step();
  };
  train();
  gathered.clear();
  train();
  const auto alone = gathered;
  {
    const torch::NoGradGuard guard;
    for (const int64_t p : {2, 1, 0, 2}) parameters[static_cast<size_t>(p)].sum();
  }
  const auto* plan = paged.pager->plan();
  EXPECT_GT(paged.pager->live_bytes(), 0);
  gathered.clear();
  train();
  EXPECT_EQ(paged.pager->plan(), plan);
  EXPECT_LE(gathered.size(), alone.size()) << "what evaluation left is used";
  EXPECT_LE(paged.ledger->usage(Category::gathered_units).peak, two);
}

TEST(Pager, PinnedUnitsOutliveTheBudget) {
  const auto parameters = matrices({2, 2, 2});
  const Paged paged(parameters, 1, 0);
  auto first = paged.pager->pin(0);
  auto second = paged.pager->pin(1);
  EXPECT_NE(paged.pager->data(0), nullptr);
  EXPECT_NE(paged.pager->data(1), nullptr);
  EXPECT_THROW(paged.pager->invalidate(), Error);
  first.release();
  EXPECT_EQ(paged.pager->data(0), nullptr);
  second = Pager::Pin();
  EXPECT_EQ(paged.pager->live_bytes(), 0);
  paged.pager->invalidate();
}

TEST(Pager, ALowerBudgetReleasesAtOnce) {
  const auto parameters = matrices({2, 2, 2});
  const Paged paged(parameters, 1, 1 << 20);
  const torch::NoGradGuard guard;
  for (const auto& p : parameters) p.sum();
  EXPECT_EQ(paged.pager->live_bytes(), 3 * 2 * 64 * 4);
  paged.pager->set_budget(2 * 64 * 4);
  EXPECT_EQ(paged.pager->live_bytes(), 2 * 64 * 4);
  paged.pager->release_all();
  EXPECT_EQ(paged.pager->live_bytes(), 0);
}

// A custom autograd function switches gradients off while its forward runs.
TEST(Pager, AStepHasPartsWithoutGradients) {
  const auto parameters = matrices({2, 2});
  Paged paged(parameters, 1, 1 << 20);
  const auto step = [&] {
    {
      const torch::NoGradGuard evaluation;
      parameters[1].sum();
    }
    parameters[0].sum();
    {
      const torch::NoGradGuard inside;
      parameters[1].sum();
      parameters[0].sum();
    }
    paged.pager->invalidate();
    paged.pager->end_step();
  };
  step();
  EXPECT_EQ(paged.pager->plan()->trace.touches(), (std::vector<int64_t>{0, 1, 0}));
  paged.source.gathered.clear();
  step();
  EXPECT_EQ(paged.source.gathered, (std::vector<int64_t>{1, 0}));
}

class FailingSource : public UnitSource {
 public:
  void gather(int64_t, void*) override {
    if (fails) throw CommError("the peer is gone");
  }
  void finish(int64_t) override {}
  bool fails = true;
};

TEST(Pager, AFailedGatherLeavesTheUnitAbsentAndUsable) {
  const auto parameters = matrices({2});
  const partition::Layout layout(Paged::describe(parameters), 1, 1);
  FailingSource source;
  Pager pager(layout, parameters, source, std::make_shared<Ledger>(), {.budget_bytes = 0});
  const torch::NoGradGuard guard;
  EXPECT_THROW(parameters[0].sum(), CommError);
  EXPECT_EQ(pager.live_bytes(), 0);
  source.fails = false;
  parameters[0].sum();
}

// Its gather takes until it is let go.
class HeldSource : public UnitSource {
 public:
  void gather(int64_t, void*) override {
    begun.count_down();
    let_go.wait();
  }
  void finish(int64_t) override {}
  std::latch begun{1};
  std::latch let_go{1};
};

TEST(Pager, AChangeWaitsForAGatherThatHasBegun) {
  const auto parameters = matrices({2});
  const partition::Layout layout(Paged::describe(parameters), 1, 1);
  HeldSource source;
  Pager pager(layout, parameters, source, std::make_shared<Ledger>(), {.budget_bytes = 0});
  std::atomic<bool> read = false;
  std::thread reader([&] {
    const auto pin = pager.pin(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    read = true;
  });
  source.begun.wait();
  std::thread change([&] {
    const Pager::Change scope(pager);
    EXPECT_TRUE(read) << "the unit is pinned from the beginning of its gather";
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  source.let_go.count_down();
  reader.join();
  change.join();
}

// Has the first half of each unit at once.
struct EarlySource : LocalSource {
  explicit EarlySource(const partition::Layout& of) : LocalSource(of), layout(of) {}
  UnitPart here(int64_t unit) override {
    const int64_t half = layout.unit(unit).numel / 2;
    return {{0, half}, at::from_blob(data(0), {half}, at::kFloat)};
  }
  const partition::Layout& layout;
};

TEST(Pager, RowsThatAreUsedEarlyAndTheOthersAreOfOneVersion) {
  const torch::NoGradGuard no_grad;
  const auto parameters = matrices({8});
  const partition::Layout layout(Paged::describe(parameters), 1, 1);
  EarlySource source(layout);
  std::memcpy(source.data(0), parameters[0].storage().data(), parameters[0].storage().nbytes());
  Pager pager(layout, parameters, source, std::make_shared<Ledger>(), {.budget_bytes = 1 << 20});
  std::thread changer;
  float early = 0;
  float late = 0;
  use_weight(
      parameters[0],
      [&](const WeightRows& here) {
        early = here.rows[0][0].item<float>();
        std::latch begun(1);
        changer = std::thread([&] {
          begun.count_down();
          const Pager::Change change(pager);  // waits until the whole use has ended
          auto* values = reinterpret_cast<float*>(source.data(0));
          std::fill(values, values + parameters[0].numel(), 2.0F);
          pager.invalidate();
        });
        begun.wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return here.rows.size(0);
      },
      [&] { late = parameters[0].detach()[7][0].item<float>(); });
  changer.join();
  EXPECT_EQ(early, 1);
  EXPECT_EQ(late, 1);
  EXPECT_EQ(parameters[0].detach()[7][0].item<float>(), 2);
  EXPECT_EQ(pager.counts().early_rows, 4);
}

TEST(Pager, ThreadsShareAUnit) {
  const auto parameters = matrices({2, 2});
  const Paged paged(parameters, 1, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      const torch::NoGradGuard guard;
      for (int i = 0; i < 200; ++i)
        EXPECT_EQ(parameters[static_cast<size_t>((t + i) % 2)].sum().item<float>(), 128);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(paged.pager->live_bytes(), 0);
}

}  // namespace
}  // namespace zero::paging
