// The first flow: it brings parameters from the table to the place where operators read them. A
// source knows the way (parameter_source.h); at stage 3 a pager asks it for units by its plan.
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
  /// Settings for stage 3.
  struct Options {
    int64_t live_bytes = 0;      ///< bytes of gathered units
    int64_t prefetch_bytes = 0;  ///< bytes of those that are gathered ahead of their use
    DiskReads disk{};
    /// See PagerOptions::rethrow.
    std::function<void()> rethrow{};
    /// See SourceParts.
    std::function<void()> touched{};
  };

  /// `table` outlives this. The destructor is collective where units are read in place, except
  /// while an exception unwinds.
  GatherFlow(StateTable& table, const Placement& placement, Options options);

  /// Makes the values that were taken visible to all ranks. At stage 3 the parameters are paged
  /// from here on, and a disk is read only after the unit's update among `updates`, which outlives
  /// this. Collective.
  void start(const std::vector<at::Tensor>& parameters, PendingUpdates& updates);

  /// Waits until no slice of this rank is being sent any more, so that slices may be written.
  void settle();
  // The source does these: see ParameterSource.
  void take(int64_t index, const at::Tensor& parameter, bool has_values) {
    source_->take(index, parameter, has_values);
  }
  void publish(int64_t unit) { source_->publish(unit); }
  void finish_publish() { source_->finish_publish(); }
  void forget() { source_->forget(); }
  void expect_look_ups(const std::vector<ExpectedLookUp>& expected) {
    source_->expect_look_ups(expected);
  }
  std::vector<RowMessages> looked_up() const { return source_->looked_up(); }
  at::Tensor full(int64_t unit) {
    start_owed();
    return source_->full(unit);
  }
  /// Starts the gathers that the other ranks count on (Pager::start_owed). Called before other
  /// collectives that may follow a forward pass.
  void start_owed() {
    if (pager_) pager_->start_owed();
  }

  /// Returns null if parameters are replicated.
  paging::Pager* pager() { return pager_.get(); }
  /// Returns whether units are read in place, so that nothing is gathered by copying.
  bool in_place() const { return table_.window() != nullptr; }

 private:
  StateTable& table_;
  Options options_;
  std::unique_ptr<ParameterSource> source_;
  std::unique_ptr<paging::Pager> pager_;  // ends first
};

}  // namespace zero
