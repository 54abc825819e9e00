// What the pager gathers, keeps and releases, against an independent simulator of the trace.
#include "zero/paging/pager.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <deque>

#include "tests/paging/local_source.h"
#include "zero/base/error.h"

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

TEST(Pager, GathersWhatTheSimulatorSaysForEveryBudget) {
  for (const int64_t budget : {0, 300, 700, 1300, 2600, 100000}) {
    const auto parameters = matrices({1, 3, 2, 5, 1, 4});
    const Paged paged(parameters, 1, budget);
    for (int step = 0; step < 3; ++step) {
      const torch::NoGradGuard guard;
      for (const int64_t p : {0, 1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0, 3, 3})
        parameters[static_cast<size_t>(p)].sum();
      paged.pager->end_step();
    }
    ASSERT_EQ(paged.pager->trace().last().size(), 15U);
    EXPECT_TRUE(paged.pager->trace().repeated());
    std::vector<int64_t> whole;
    for (int step = 0; step < 3; ++step)
      whole.insert(whole.end(), paged.pager->trace().last().begin(),
                   paged.pager->trace().last().end());
    EXPECT_EQ(paged.source.gathered, simulate(whole, paged.layout, budget)) << "budget " << budget;
    EXPECT_LE(paged.ledger->usage(Category::gathered_units).peak,
              std::max<int64_t>(budget, 5 * 64 * 4));
  }
}

TEST(Pager, AChangedStepIsNoticed) {
  const auto parameters = matrices({1, 2});
  const Paged paged(parameters, 1, 0);
  const torch::NoGradGuard guard;
  for (const int64_t extra : {0, 0, 1}) {
    parameters[0].sum();
    parameters[static_cast<size_t>(extra)].sum();
    paged.pager->end_step();
  }
  EXPECT_FALSE(paged.pager->trace().repeated());
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

class FailingSource : public UnitSource {
 public:
  void gather(int64_t, void*) override {
    if (fails) throw CommError("the peer is gone");
  }
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
