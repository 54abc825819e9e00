// The first flow: parameters from the table to where operators read them. A source knows the way
// (parameter_source.h); at stage 3 a pager asks it for units by its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

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
    DiskReads disk{};
    /// See PagerOptions::rethrow.
    std::function<void()> rethrow{};
    /// See SourceParts.
    std::function<void()> touched{};
  };

  /// `table` outlives this. Ends collectively where units are read in place, except
  /// while an exception unwinds.
  GatherFlow(StateTable& table, const Placement& placement, Options options);

  /// Makes the values that were taken visible to all ranks. At stage 3 the parameters are paged
  /// from here on, and `updates`, which outlives this, are complete before a disk is read.
  /// Collective.
  void start(const std::vector<at::Tensor>& parameters, LateUpdates& updates);

  /// Waits until none of this rank's slices is on its way any more: they may be written.
  void settle();
  // These are the source's: see ParameterSource.
  void take(int64_t index, const at::Tensor& parameter, bool has_values) {
    source_->take(index, parameter, has_values);
  }
  void publish(int64_t unit) { source_->publish(unit); }
  void finish_publish() { source_->finish_publish(); }
  void forget() { source_->forget(); }
  at::Tensor full(int64_t unit) { return source_->full(unit); }

  /// Returns null where parameters are replicated.
  paging::Pager* pager() { return pager_.get(); }
  /// Units are read in place, and nothing is gathered by copying.
  bool in_place() const { return table_.window() != nullptr; }

 private:
  StateTable& table_;
  Options options_;
  std::unique_ptr<ParameterSource> source_;
  std::unique_ptr<paging::Pager> pager_;  // ends first
};

}  // namespace zero
