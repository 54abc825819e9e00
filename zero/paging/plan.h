// The plan: which units stay present between their uses, so that a step gathers as few bytes as the
// budget allows.
//
// Note [Planned paging]
// A step repeats the operators of the one before, so their future is known. An interval lies
// between two consecutive uses of a unit. A unit that is kept over an interval need not be gathered
// at its end, and takes its bytes from the budget meanwhile. A choice of intervals is possible
// under two conditions. While an operator runs, the kept units and those that it pins must fit in
// the budget (or it keeps nothing but the units that it pins). Between operators the kept units
// must fit.
//
// For units of equal size Belady's rule (when room is short, give up the unit whose next use is
// farthest) keeps as many intervals as possible, even if operators pin several units at once (L. A.
// Belady, IBM Systems Journal 5(2), 1966; as interval packing: U. Faigle and W. M. Nawijn, Discrete
// Applied Mathematics 58, 1995). For unequal sizes the problem is NP-hard. There the planner starts
// with Belady's rule, fills holes with intervals that still fit, and exchanges single intervals for
// larger ones. Then a branch-and-bound search improves the result until it is proven or its effort
// is spent. The bound is the same problem with units that may be kept in part, which Belady's rule
// solves exactly: no plan gathers less than `bound_bytes`.
//
// Gathers are then moved ahead of their use (prefetch) as far as the budget and the window allow;
// that changes neither their order nor their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "zero/paging/trace.h"

namespace zero::paging {

struct PlanOptions {
  int64_t budget_bytes = 0;
  /// Bytes that may be gathered ahead of their use; 0 gathers on demand.
  int64_t prefetch_bytes = 0;
  /// The limit of the search for units of unequal size: the number of touches that it looks at.
  int64_t effort = 4'000'000;
};

struct Plan {
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  Trace trace;
  /// Tells, by touch, whether the unit stays present until the next operator that touches it.
  std::vector<uint8_t> keep;
  /// For each touch, the next operator that touches the unit; kNever if there is none.
  std::vector<size_t> next;
  /// The gathers in order. `unit` is needed by operator `use`; its gather may start right before
  /// operator `start` runs (start <= use).
  struct Gather {
    int64_t unit = 0;
    size_t start = 0;
    size_t use = 0;
  };
  std::vector<Gather> gathers;
  int64_t gathered_bytes = 0;
  /// No choice gathers fewer bytes than this within the budget.
  int64_t bound_bytes = 0;
};

/// Plans `trace` for units of `unit_bytes` bytes (by unit). No unit is present before the first
/// operator.
Plan make_plan(Trace trace, std::span<const int64_t> unit_bytes, const PlanOptions& options);

}  // namespace zero::paging
