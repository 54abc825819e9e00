#include "zero/engine/reduction_order.h"

#include <utility>

namespace zero {

ReductionOrder::ReductionOrder(const std::vector<int64_t>& units)
    : units_(units.rbegin(), units.rend()) {}

void ReductionOrder::became_ready(int64_t unit) {
  if (!known_ && std::ranges::find(ready_, unit) == ready_.end()) ready_.push_back(unit);
}

std::vector<int64_t> ReductionOrder::seen() const {
  auto order = ready_;
  for (const int64_t unit : units_) {
    if (std::ranges::find(ready_, unit) == ready_.end()) order.push_back(unit);
  }
  return order;
}

void ReductionOrder::adopt(std::span<const int32_t> units) {
  if (!std::exchange(known_, true)) std::ranges::copy(units, units_.begin());
}

std::optional<int64_t> ReductionOrder::turn() const {
  if (next_ >= units_.size()) return {};
  return units_[next_];
}

}  // namespace zero
