// The ways in which parameters come from the table to the place where operators read them. Each has
// a file.
//
// Note [Sources of parameters]
// At stages 0 to 2 every rank has all elements of each unit, and the owners publish their updated
// slices (whole_units.cpp). At stage 3 a pager asks a source for units: slices may lie side by side
// in memory that the ranks of a host share (window_units.cpp), or they are gathered over the ranks
// (sliced_units.cpp), or over those of a host whose devices keep all of them (kept_units.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/look_ups.h"
#include "zero/engine/placement.h"
#include "zero/engine/slice_source.h"
#include "zero/engine/state_table.h"
#include "zero/paging/pager.h"

namespace zero {

class ParameterSource {
 public:
  virtual ~ParameterSource() = default;

  /// Takes the values of parameter `index` (in the unit's dtype), and gives the memory of the
  /// tensor up. Without values the table's zeros stay.
  virtual void take(int64_t index, const at::Tensor& parameter, bool has_values) = 0;
  /// All values have been taken. A unit that is read from now on is read after its update among
  /// `updates`, which outlives this. Returns the source that a pager reads units from, or null
  /// where parameters are always here.
  virtual paging::UnitSource* start(PendingUpdates& updates) = 0;
  /// The owned parameters of `unit` have new values: brings them to the other ranks.
  virtual void publish(int64_t unit) = 0;
  /// Blocks until all ranks' new values that this rank needs at once are here.
  virtual void finish_publish() {}
  /// Blocks until none of this rank's slices is on its way any more: they may be written.
  virtual void settle() {}
  /// The parameters change: forgets writes to gathered units, and slices that were read ahead.
  virtual void forget() {}
  /// A step begins in which all ranks expect these look-ups: see RowLookUps.
  virtual void expect_look_ups(const std::vector<ExpectedLookUp>& /*expected*/) {}
  /// Returns the messages of the rows of the step before, by weight.
  virtual std::vector<RowMessages> looked_up() const { return {}; }
  /// Returns the full unit in its dtype, as the owners store it (never quantised): valid until the
  /// parameters change. Collective if gathers are matched.
  virtual at::Tensor full(int64_t unit) = 0;
};

/// The parts of an engine that sources are made of. `table` outlives them.
struct SourceParts {
  StateTable& table;
  const Placement& placement;
  /// At stage 3 called on the thread of an operator that is about to use a unit, with the pager's
  /// lock held. May be empty.
  std::function<void()> touched{};
};

std::unique_ptr<ParameterSource> whole_units(const SourceParts& parts);
/// Needs a table with a window. Its end is collective, except while an exception unwinds.
std::unique_ptr<ParameterSource> window_units(const SourceParts& parts);
/// Needs a placement with `host`.
std::unique_ptr<ParameterSource> kept_units(const SourceParts& parts);
std::unique_ptr<ParameterSource> sliced_units(const SourceParts& parts, DiskReads reads);

/// A source for the pager of stage 3: parameters that lie in slices.
class PagedSource : public ParameterSource, public paging::UnitSource {
 public:
  explicit PagedSource(const SourceParts& parts) : table_(parts.table), touched_(parts.touched) {}

  void take(int64_t index, const at::Tensor& parameter, bool has_values) override;
  at::Tensor full(int64_t unit) override;
  void touched(int64_t unit) override;

 protected:
  const partition::Layout& layout() const { return table_.layout(); }
  StateTable& table() const { return table_; }
  comm::Group& group() const { return table_.group(); }
  const std::string& label(int64_t unit) const { return table_.label(unit); }

 private:
  StateTable& table_;
  std::function<void()> touched_;
};

/// Throws if memory of the host allocator, from which `parameter` was read, has been overrun.
void check_memory_of(const at::Tensor& parameter);

}  // namespace zero
