// The order in which units are reduced, which is the same on all ranks.
//
// Note [Order of reductions]
// The calls of a collective must match on all ranks, so every rank reduces the units in one order,
// and a unit that is ready early waits for its turn. The order is that in which units became ready
// on rank 0 in the first pass of all; rank 0 tells it to the others at the end of the first step.
// Until then it is the units' own order backwards, since backward meets the last layers first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace zero {

/// Keeps the order, and whose turn it is in the pass under way.
class ReductionOrder {
 public:
  /// Takes the units that are trained, in the order of the layout.
  explicit ReductionOrder(const std::vector<int64_t>& units)
      : units_(units.rbegin(), units.rend()) {}

  const std::vector<int64_t>& units() const { return units_; }
  /// Returns whether rank 0 has told the order that units became ready in.
  bool known() const { return known_; }

  /// Notes that the unit became ready, as long as the order is not known.
  void became_ready(int64_t unit) {
    if (!known_ && std::ranges::find(ready_, unit) == ready_.end()) ready_.push_back(unit);
  }
  /// Returns the order that this rank has seen. Units that never became ready by themselves come
  /// last, so that no other unit waits for them.
  std::vector<int64_t> seen() const {
    auto order = ready_;
    std::ranges::copy_if(units_, std::back_inserter(order), [&](int64_t unit) {
      return std::ranges::find(ready_, unit) == ready_.end();
    });
    return order;
  }
  /// Takes rank 0's order, once; later calls do nothing.
  void adopt(std::span<const int32_t> units) {
    if (!std::exchange(known_, true)) std::ranges::copy(units, units_.begin());
  }
  /// Moves these units behind the others.
  template <class Predicate>
  void move_back(const Predicate& moves) {
    std::ranges::stable_partition(units_, [&](int64_t unit) { return !moves(unit); });
  }

  /// The first unit has the turn again.
  void restart() { next_ = 0; }
  /// Returns the unit that has the turn; nothing when all have had it.
  std::optional<int64_t> turn() const {
    if (next_ >= units_.size()) return {};
    return units_[next_];
  }
  /// Gives the turn to the next unit.
  void advance() { ++next_; }

 private:
  std::vector<int64_t> units_;
  std::vector<int64_t> ready_;
  bool known_ = false;
  size_t next_ = 0;
};

}  // namespace zero
