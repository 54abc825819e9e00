// The trace: the sequence of units that operators touch during a step.
#pragma once

#include <cstdint>
#include <vector>

namespace zero::paging {

/// Records touches in order. A step repeats the same sequence, so the last complete step is a
/// forecast of the next: prefetch and replacement plan on it.
class Trace {
 public:
  void record(int64_t unit) { current_.push_back(unit); }
  /// Ends a step: what was recorded becomes `last`. Memory of the earlier one is reused.
  void end_step() {
    repeated_ = current_ == last_;
    last_.swap(current_);
    current_.clear();
  }
  /// The last complete step; empty before the first ends.
  const std::vector<int64_t>& last() const { return last_; }
  /// The last complete step touched what the one before it touched, in the same order.
  bool repeated() const { return repeated_; }

 private:
  std::vector<int64_t> last_;
  std::vector<int64_t> current_;
  bool repeated_ = false;
};

}  // namespace zero::paging
