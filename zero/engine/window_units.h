// Stage 3 with nothing to copy on a host: slices lie side by side in a window, an array that the
// ranks of a host share, and a gather waits for their owners alone.
//
// Note [Kept on a host]
// ZeRO++'s hpZ (2306.10209, section 3.2): on several hosts each keeps all parameters from one
// update to the next. Its ranks do not keep a second partition to gather from, as there: the host
// has one array, which they read in place (comm::Window). So parameters cross between hosts once a
// step, however many micro-batches it has, and nothing is gathered inside a host. A unit that
// crosses quantised lies in the array as the messages say it, and its slices have memory of their
// own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "zero/engine/parameter_source.h"

namespace zero {

class WindowUnits final : public PagedSource {
 public:
  /// As PagedSource; the table has a window.
  WindowUnits(const partition::Layout& layout, StateTable& table, const Placement& placement,
              std::function<void()> touched);
  /// Collective, except while an exception unwinds.
  ~WindowUnits() override;

  paging::UnitSource* start(LateUpdates& /*updates*/) override { return this; }
  void publish(int64_t unit) override;
  void settle() override { window_.settle(); }
  void forget() override { window_.discard(); }
  at::Tensor full(int64_t unit) override;

  bool in_place() const override { return true; }
  void* view(int64_t unit) override;
  void gather(int64_t unit, void* destination) override;
  void finish(int64_t unit) override;

 private:
  std::pair<int64_t, int64_t> units_on_pages_of(int64_t unit) const;

  comm::Window& window_;
  at::Tensor view_;                 // of the window, for this rank's operators
  std::vector<at::Tensor> places_;  // of units in the window
  std::vector<uint64_t> epoch_;     // by unit, the same on all ranks
};

}  // namespace zero
