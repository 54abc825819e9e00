// Plans against an exhaustive search over every set of units that may stay after every operator.
#include "zero/paging/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

namespace zero::paging {
namespace {

Trace trace_of(const std::vector<std::vector<int64_t>>& operators) {
  Trace trace;
  for (const auto& units : operators) trace.record(units);
  return trace;
}

int64_t bytes_of(uint32_t set, const std::vector<int64_t>& unit_bytes) {
  int64_t sum = 0;
  for (size_t u = 0; u < unit_bytes.size(); ++u) sum += (set >> u & 1U) != 0 ? unit_bytes[u] : 0;
  return sum;
}

// The fewest bytes that must be gathered: dynamic programming over the sets of units that stay.
int64_t optimum(const Trace& trace, const std::vector<int64_t>& unit_bytes, int64_t budget) {
  std::map<uint32_t, int64_t> cheapest{{0, 0}};  // what stays -> bytes so far
  for (size_t op = 0; op < trace.operators(); ++op) {
    uint32_t pinned = 0;
    for (const int64_t u : trace.units(op)) pinned |= 1U << u;
    const int64_t limit = std::max(budget, bytes_of(pinned, unit_bytes));
    std::map<uint32_t, int64_t> next;
    const auto offer = [](std::map<uint32_t, int64_t>& to, uint32_t set, int64_t cost) {
      const auto [found, fresh] = to.emplace(set, cost);
      if (!fresh) found->second = std::min(found->second, cost);
    };
    for (const auto& [stay, cost] : cheapest) {
      // A unit that stays may be given up right before the operator too.
      for (uint32_t held = stay;; held = (held - 1) & stay) {
        const uint32_t during = held | pinned;
        if (bytes_of(during, unit_bytes) <= limit) {
          const int64_t total = cost + bytes_of(pinned & ~held, unit_bytes);
          for (uint32_t after = during;; after = (after - 1) & during) {
            if (bytes_of(after, unit_bytes) <= budget) offer(next, after, total);
            if (after == 0) break;
          }
        }
        if (held == 0) break;
      }
    }
    cheapest = std::move(next);
  }
  int64_t best = std::numeric_limits<int64_t>::max();
  for (const auto& [stay, cost] : cheapest) best = std::min(best, cost);
  return best;
}

// Carries a plan out: what is gathered, and that room and validity are kept to at every instant.
int64_t carry_out(const Plan& plan, const std::vector<int64_t>& unit_bytes, int64_t budget) {
  const auto& trace = plan.trace;
  std::vector<uint8_t> present(unit_bytes.size(), 0);
  size_t next_gather = 0;
  int64_t live = 0;
  int64_t gathered = 0;
  for (size_t op = 0; op < trace.operators(); ++op) {
    int64_t pinned = 0;
    for (const int64_t u : trace.units(op)) pinned += unit_bytes[static_cast<size_t>(u)];
    for (; next_gather < plan.gathers.size() && plan.gathers[next_gather].start <= op;
         ++next_gather) {
      const auto u = static_cast<size_t>(plan.gathers[next_gather].unit);
      EXPECT_LE(plan.gathers[next_gather].start, plan.gathers[next_gather].use);
      EXPECT_EQ(std::exchange(present[u], 1), 0) << "gathered twice";
      live += unit_bytes[u];
      gathered += unit_bytes[u];
    }
    EXPECT_LE(live, std::max(budget, pinned)) << "operator " << op;
    for (size_t i = trace.begin(op); i < trace.begin(op + 1); ++i) {
      const auto u = static_cast<size_t>(trace.touches()[i]);
      EXPECT_EQ(present[u], 1) << "used while absent";
      if (plan.keep[i] != 0) continue;
      present[u] = 0;
      live -= unit_bytes[u];
    }
    EXPECT_LE(live, budget) << "after operator " << op;
  }
  EXPECT_EQ(next_gather, plan.gathers.size());
  return gathered;
}

// Forward and backward through layers that share some units, as training does.
Trace training(std::mt19937& random, int64_t units, size_t operators) {
  std::vector<std::vector<int64_t>> list;
  const auto any = [&](int64_t below) {
    return std::uniform_int_distribution<int64_t>(0, below - 1)(random);
  };
  for (size_t i = 0; i < operators; ++i) {
    std::vector<int64_t> pins{any(units)};
    if (any(3) == 0) {
      const int64_t other = any(units);
      if (other != pins[0]) pins.push_back(other);
    }
    list.push_back(pins);
  }
  for (size_t i = operators; i-- > 0;) list.push_back(list[i]);
  return trace_of(list);
}

TEST(Plan, GathersTheMinimumForEqualUnits) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t units = 3 + trial % 4;
    const std::vector<int64_t> unit_bytes(static_cast<size_t>(units), 10);
    const auto trace = training(random, units, 6 + static_cast<size_t>(trial % 5));
    for (int64_t budget = 0; budget <= units * 10; budget += 5) {
      const auto plan = make_plan(trace, unit_bytes, {.budget_bytes = budget});
      EXPECT_EQ(plan.gathered_bytes, optimum(trace, unit_bytes, budget)) << "budget " << budget;
      EXPECT_EQ(carry_out(plan, unit_bytes, budget), plan.gathered_bytes);
    }
  }
}

TEST(Plan, GathersTheMinimumForUnequalUnitsAndKnowsABound) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t units = 3 + trial % 4;
    std::vector<int64_t> unit_bytes;
    for (int64_t u = 0; u < units; ++u)
      unit_bytes.push_back(std::uniform_int_distribution<int64_t>(1, 40)(random));
    const int64_t all = std::accumulate(unit_bytes.begin(), unit_bytes.end(), int64_t{0});
    const auto trace = training(random, units, 6 + static_cast<size_t>(trial % 5));
    for (int64_t budget = 0; budget <= all; budget += 7) {
      const auto plan = make_plan(trace, unit_bytes, {.budget_bytes = budget});
      const int64_t least = optimum(trace, unit_bytes, budget);
      EXPECT_EQ(plan.gathered_bytes, least) << "budget " << budget;
      EXPECT_LE(plan.bound_bytes, least);
      EXPECT_EQ(carry_out(plan, unit_bytes, budget), plan.gathered_bytes);
    }
  }
}

// The rule, the filling and the exchanges must come close alone, without time for the search.
TEST(Plan, IsWithinFivePercentOfTheBoundForLongTraces) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 10; ++trial) {
    std::vector<int64_t> unit_bytes;
    for (int u = 0; u < 40; ++u)
      unit_bytes.push_back(std::uniform_int_distribution<int64_t>(1, 40)(random));
    const int64_t all = std::accumulate(unit_bytes.begin(), unit_bytes.end(), int64_t{0});
    const auto trace = training(random, 40, 150);
    for (const int64_t budget : {all / 6, all / 3, all / 2, all * 3 / 4}) {
      const auto plan = make_plan(trace, unit_bytes, {.budget_bytes = budget});
      EXPECT_LE(static_cast<double>(plan.gathered_bytes),
                1.05 * static_cast<double>(plan.bound_bytes));
      EXPECT_EQ(carry_out(plan, unit_bytes, budget), plan.gathered_bytes);
    }
  }
}

TEST(Plan, PrefetchesAheadWithinBudgetAndWindow) {
  std::mt19937 random(4);
  int64_t ahead = 0;
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<int64_t> unit_bytes;
    for (int u = 0; u < 8; ++u)
      unit_bytes.push_back(std::uniform_int_distribution<int64_t>(1, 20)(random));
    const auto trace = training(random, 8, 20);
    for (const int64_t budget : {0, 30, 50, 1000}) {
      const PlanOptions options{.budget_bytes = budget, .prefetch_bytes = 30};
      const auto on_demand = make_plan(trace, unit_bytes, {.budget_bytes = budget});
      const auto plan = make_plan(trace, unit_bytes, options);
      EXPECT_EQ(carry_out(plan, unit_bytes, budget), on_demand.gathered_bytes);
      size_t earliest = 0;
      std::vector<int64_t> window(trace.operators(), 0);
      for (const auto& gather : plan.gathers) {
        EXPECT_GE(gather.start, earliest) << "out of order";
        earliest = gather.start;
        for (size_t op = gather.start; op < gather.use; ++op) {
          window[op] += unit_bytes[static_cast<size_t>(gather.unit)];
          EXPECT_LE(window[op], 30);
        }
        ahead += static_cast<int64_t>(gather.use - gather.start);
      }
      EXPECT_EQ(plan.gathers.size(), on_demand.gathers.size());
    }
  }
  EXPECT_GT(ahead, 100);
}

TEST(Plan, KeepsEverythingWhereEverythingFits) {
  const auto plan = make_plan(trace_of({{0}, {1, 2}, {0, 1}, {2}}), std::vector<int64_t>{5, 6, 7},
                              {.budget_bytes = 18});
  EXPECT_EQ(plan.gathered_bytes, 18);
  EXPECT_EQ(plan.bound_bytes, 18);
  EXPECT_EQ(plan.next, (std::vector<size_t>{2, 2, 3, Plan::kNever, Plan::kNever, Plan::kNever}));
}

TEST(Plan, OfNothingIsEmpty) {
  const auto plan = make_plan({}, std::vector<int64_t>{5}, {.budget_bytes = 18});
  EXPECT_TRUE(plan.gathers.empty());
  EXPECT_EQ(plan.gathered_bytes, 0);
}

}  // namespace
}  // namespace zero::paging
