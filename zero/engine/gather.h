// The first flow: parameters from the table to where operators read them. A source knows the way
// (parameter_source.h); at stage 3 a pager asks it for units by its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/engine/disk_slices.h"
#include "zero/engine/late_updates.h"
#include "zero/engine/parameter_source.h"
#include "zero/engine/placement.h"
#include "zero/engine/state_table.h"
#include "zero/paging/pager.h"
#include "zero/partition/layout.h"

namespace zero {

class GatherFlow {
 public:
  /// Stage 3.
  struct Options {
    int64_t live_bytes = 0;      ///< of gathered units
    int64_t prefetch_bytes = 0;  ///< of those, gathered ahead of their use
    BufferedSlices::Options disk{};
    /// As PagerOptions::rethrow.
    std::function<void()> rethrow{};
    /// As for PagedSource.
    std::function<void()> touched{};
  };

  /// `layout` and `table` outlive this. Ends collectively where units are read in place, except
  /// while an exception unwinds.
  GatherFlow(const partition::Layout& layout, StateTable& table, const Placement& placement,
             Options options);

  /// Takes the values of parameter `index` (in the unit's dtype), and gives the memory of the
  /// tensor up.
  void take(int64_t index, const at::Tensor& parameter) { source_->take(index, parameter); }
  /// Makes the values that were taken visible to all ranks. At stage 3 the parameters are paged
  /// from here on, and `updates`, which outlives this, are complete before a disk is read.
  /// Collective.
  void start(const std::vector<at::Tensor>& parameters, LateUpdates& updates);

  /// The owned parameters of `unit` have new values. Stage 0: nothing to do. Stages 1 and 2: the
  /// all-gather of the unit starts. Stage 3: readers may gather.
  void publish(int64_t unit) { source_->publish(unit); }
  /// Waits for the all-gathers that `publish` started. At stage 3 they may go on beside the passes
  /// that need them.
  void finish_publish() { source_->finish_publish(); }
  /// Waits until none of this rank's slices is on its way any more: they may be written.
  void settle();
  /// The parameters change: forgets what was written to gathered units, and what was read ahead.
  void forget() { source_->forget(); }
  /// Returns the full unit in its dtype: valid until the parameters change. At stage 3 gathers it,
  /// exact (never quantised). Collective where gathers are matched.
  at::Tensor full(int64_t unit) { return source_->full(unit); }

  /// Returns null where parameters are replicated.
  paging::Pager* pager() { return pager_.get(); }
  /// Units are read in place, and nothing is gathered by copying.
  bool in_place() const { return table_.window() != nullptr; }

 private:
  const partition::Layout& layout_;
  StateTable& table_;
  Options options_;
  std::unique_ptr<ParameterSource> source_;
  std::unique_ptr<paging::Pager> pager_;  // ends first
};

}  // namespace zero
