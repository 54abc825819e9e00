// The rows of a sharded weight that a look-up needs, from their owners, without the whole weight.
//
// Note [Look-ups by rows]
// At stage 3 between hosts an embedding is often the largest weight of a model, and a step needs
// few of its rows. If the look-up gathered the weight, the link would carry all of it before the
// first block can begin. So the ranks tell each other which rows they look up, and each owner sends
// those of its slice to all. A tied weight is also the output projection. It is gathered behind the
// blocks, for the projection, which begins with what is here (Note [Logits in blocks] in
// models/layers/cross_entropy.cpp). A weight that only look-ups use is not gathered at all.
//
// All ranks must do the same. A rank may have no look-up in a step, or may use the weight otherwise
// before. So in a step in which look-ups are expected, a gather of the weight, whoever wants it,
// tells the others what it is for: its rows, or all of the weight. If a rank needs all of it, or if
// the step's rows are too many (kLookUpShare), every rank gathers it. The pager says how ranks stay
// together that do different things: Note [Gathers that ranks agree on] in paging/pager.h.
// Look-ups are expected if all ranks had one in the last pass of the step before, and nothing else
// used the weight but the projection: that is when the gradient can leave by rows or in tiles (the
// notes in look_up_gradient.h). If one weight is tied, the others are gathered whole, since the
// order of gathers that is agreed on for a tied weight has no place for their rows. Their gradients
// leave as rows all the same.
//
// A message has M C elements of each of N ranks, where M is the number of different rows that all
// ranks look up and that lie in one rank's slice, of the rank that has most:
// GatherFlow::looked_up, in the formula of the step's bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/look_ups.h"
#include "zero/engine/state_table.h"
#include "zero/paging/pager.h"
#include "zero/partition/layout.h"

namespace zero {

/// Rows that some rank looks up.
struct AgreedRows {
  std::vector<int64_t> rows;  ///< ascending
  bool same_order = true;     ///< all ranks have given the same order
};

/// Returns the rows, below `count`, that some rank looks up, or nothing if a rank has no `indices`
/// (...) int64 (undefined), or invalid ones. Collective.
std::optional<AgreedRows> agree_on_rows(comm::Group& group, int64_t count,
                                        const at::Tensor& indices, uint64_t order,
                                        std::string_view label);

/// Rows of a weight (V, C) that is all of a unit, by the ranks that have elements of them, and
/// their places in messages that have `message` elements for each of these owners.
struct RowShares {
  /// `rows` ascend.
  RowShares(const partition::Layout& layout, int64_t unit, std::vector<int64_t> rows,
            int64_t columns);
  /// Calls `f` for each of the owner's rows with the part of it that lies in the owner's slice, the
  /// place of that part in the owner's elements of a message, and the row's position in `rows`.
  void for_each(int owner, const std::function<void(partition::Range part, int64_t in_message,
                                                    int64_t position)>& f) const;
  /// Returns the elements of a message, all owners together.
  int64_t all() const { return message * static_cast<int64_t>(of_owner.size()); }

  std::vector<int64_t> rows;
  int64_t columns = 0;                         ///< C
  std::vector<partition::Range> slices;        ///< by owner
  std::vector<std::vector<int64_t>> of_owner;  ///< by owner, positions in `rows`
  int64_t message = 0;  ///< elements of the rows of the owner that has most of them, rounded up
};

/// Fetches rows of weights.
class RowLookUps {
 public:
  /// `table` outlives this.
  explicit RowLookUps(StateTable& table);

  /// A step begins in which these look-ups are expected.
  void expect(const std::vector<ExpectedLookUp>& expected);
  /// Does what UnitSource::asks does.
  paging::UnitSource::Asks asks(int64_t unit) const;
  /// Does what UnitSource::look_up does, for `indices` (...) on the CPU; where they are not of
  /// int64, this rank needs the unit. Returns the rows (..., C), if at all. The slice is up to date
  /// when `up_to_date` returns. Collective.
  at::Tensor look_up(int64_t unit, const paging::UnitSource::LookUp& mine,
                     const std::function<void()>& up_to_date);
  /// Returns the messages of the step before the last `expect`.
  const std::vector<RowMessages>& of_last_step() const { return of_last_step_; }

 private:
  struct Unit {
    int64_t columns = 0;
    RowMessages of_step{};
  };
  bool suits(int64_t unit) const;
  void fetch(int64_t unit, const RowShares& shares, const at::Tensor& tokens, void* to);

  StateTable& table_;
  std::vector<std::atomic<paging::UnitSource::Asks>> asks_;  // by unit
  std::map<int64_t, Unit> units_;                            // those that are expected
  std::vector<RowMessages> of_last_step_;
};

}  // namespace zero
