// The trace: the units that the operators of a step pin, in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zero::paging {

/// A sequence of operators, each with the distinct units that it pins at once. An operator without
/// units is a look-up by rows (Note [Gathers that ranks agree on] in pager.h). An operator of a
/// forward pass is another than one of a backward pass that pins the same units.
class Trace {
 public:
  void record(std::span<const int64_t> units, bool backward = false) {
    touches_.insert(touches_.end(), units.begin(), units.end());
    ends_.push_back(touches_.size());
    backward_.push_back(backward ? 1 : 0);
  }
  /// Forgets everything; the memory is kept.
  void clear() {
    touches_.clear();
    ends_.clear();
    backward_.clear();
  }
  size_t operators() const { return ends_.size(); }
  bool empty() const { return ends_.empty(); }
  /// Returns the index into `touches` of an operator's first unit. `index` may be one past the last
  /// operator.
  size_t begin(size_t index) const { return index == 0 ? 0 : ends_[index - 1]; }
  std::span<const int64_t> units(size_t index) const {
    return std::span(touches_).subspan(begin(index), ends_[index] - begin(index));
  }
  /// Returns all units of all operators, one after the other.
  const std::vector<int64_t>& touches() const { return touches_; }
  /// Returns whether operator `index` exists and pins exactly `units`.
  bool has(size_t index, std::span<const int64_t> units) const {
    return index < operators() && std::ranges::equal(this->units(index), units);
  }
  /// Returns whether it is so, and the operator is one of a backward pass if `backward`, otherwise
  /// one of a forward pass.
  bool has(size_t index, std::span<const int64_t> units, bool backward) const {
    return has(index, units) && (backward_[index] != 0) == backward;
  }
  /// Returns whether `other` begins with all of these operators.
  bool is_prefix_of(const Trace& other) const {
    return operators() <= other.operators() &&
           std::equal(ends_.begin(), ends_.end(), other.ends_.begin()) &&
           std::equal(backward_.begin(), backward_.end(), other.backward_.begin()) &&
           std::equal(touches_.begin(), touches_.end(), other.touches_.begin());
  }
  bool operator==(const Trace&) const = default;

 private:
  std::vector<int64_t> touches_;
  std::vector<size_t> ends_;       // by operator
  std::vector<uint8_t> backward_;  // by operator: 1 if it is one of a backward pass
};

}  // namespace zero::paging
