// The rows of a sharded weight that a look-up needs, from their owners, without the whole weight.
//
// Note [Look-ups by rows]
// At stage 3 between hosts a tied weight is used twice in a forward pass: its first use is the
// look-up of the tokens, the last one the output projection. The look-up needs some rows. If it
// gathered the weight, which is often the largest of a model, the link would carry all of it before
// the first block can begin, and would stand still while the head is computed. So the ranks tell
// each other which rows they look up, each owner sends those of its slice to all, and the weight is
// gathered behind the blocks, for the projection, which begins with what is here (Note [Logits in
// blocks] in models/layers/cross_entropy.cpp).
//
// All ranks must do the same. A rank may have no look-up in a step, or may use the weight otherwise
// before. So in a step in which one is expected, the first gather of the weight, whoever wants it,
// tells the others what it is for: its rows, or all of the weight. If a rank needs all of it, or if
// the rows are too many (kLookUpShare), every rank gathers it. The pager says how ranks stay
// together that do different things: Note [Gathers that ranks agree on] in paging/pager.h. A
// look-up is expected if all ranks had one in the step before, with the projection behind it: that
// is when the gradient can leave in tiles (Note [Tied gradient in tiles] in tied_gradient.h).
//
// The message has M C elements of each of N ranks, where M is the number of different rows that all
// ranks look up and that lie in one rank's slice, of the rank that has most:
// GatherFlow::looked_up, in the formula of the step's bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/look_ups.h"
#include "zero/engine/state_table.h"
#include "zero/paging/pager.h"
#include "zero/partition/layout.h"

namespace zero {

/// Returns the rows, below `count` and ascending, that some rank looks up, or nothing if a rank has
/// no `indices` (...) int64 (undefined), or invalid ones, or another `order` than rank 0.
/// Collective.
std::optional<std::vector<int64_t>> agree_on_rows(comm::Group& group, int64_t count,
                                                  const at::Tensor& indices, uint64_t order,
                                                  std::string_view label);

/// Rows of a weight that is all of a unit, by the ranks that have elements of them.
struct RowShares {
  RowShares(const partition::Layout& layout, int64_t unit, const std::vector<int64_t>& rows,
            int64_t columns);
  std::vector<std::vector<int64_t>> of_owner;  ///< by rank, positions in `rows`
  int64_t message = 0;  ///< elements of the rows of the owner that has most of them
  bool few = false;     ///< the messages of all owners have few elements: kLookUpShare
};

/// Fetches rows for the first use of a weight in a step.
class RowLookUps {
 public:
  /// `table` outlives this.
  explicit RowLookUps(StateTable& table) : table_(table) {}

  /// A step begins in which the look-up of this parameter (V, C) is expected; -1: none is.
  void expect(int64_t parameter, int64_t columns);
  /// Returns the unit whose next gather tells the others what it is for; -1: there is none.
  int64_t asks() const { return asked_; }
  /// Does what UnitSource::look_up does, for `indices` (...) on the CPU; where they are not of
  /// int64, this rank needs the unit. Returns the rows (..., C), if at all. The slice is up to date
  /// when `meanwhile` returns. Collective.
  at::Tensor look_up(const paging::UnitSource::LookUp& mine);
  /// Returns the message of the step before the last `expect`.
  LookUpMessages of_last_step() const { return of_last_step_; }

 private:
  void fetch(const std::vector<int64_t>& rows, const RowShares& shares, const at::Tensor& tokens,
             void* to);

  StateTable& table_;
  std::atomic<int64_t> asked_ = -1;  // the unit
  int64_t unit_ = -1;
  int64_t columns_ = 0;
  LookUpMessages of_step_{};
  LookUpMessages of_last_step_{};
};

}  // namespace zero
