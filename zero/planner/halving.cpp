#include "zero/planner/halving.h"

#include <algorithm>
#include <iterator>

namespace zero::plan {

std::vector<Tried> halve(size_t count,
                         const std::function<Speed(size_t candidate, int64_t steps)>& measure,
                         const HalvingOptions& options) {
  std::vector<Tried> left;
  for (size_t i = 0; i < count; ++i) left.push_back({.candidate = i});
  std::vector<Tried> dropped;  // the last one first
  std::vector<Tried> failed;
  for (int64_t steps = options.first_steps; !left.empty(); steps *= 2) {
    for (auto& each : left) {
      each.steps = steps;
      each.speed = measure(each.candidate, steps);
    }
    std::erase_if(left, [&](const Tried& each) {
      if (each.speed.failure.empty()) return false;
      failed.push_back(each);
      return true;
    });
    std::ranges::stable_sort(left, {}, [](const Tried& each) { return each.speed.seconds; });
    if (left.size() < 2) break;
    const auto& first = left.front().speed;
    const auto& last = left.back().speed;
    if (last.seconds - first.seconds <= std::max(first.spread, last.spread)) {
      std::ranges::sort(left, {}, &Tried::candidate);
      break;
    }
    const auto half = static_cast<std::ptrdiff_t>((left.size() + 1) / 2);
    dropped.insert(dropped.begin(), left.begin() + half, left.end());
    left.erase(left.begin() + half, left.end());
    if (left.size() < 2) break;
  }
  std::ranges::move(dropped, std::back_inserter(left));
  std::ranges::move(failed, std::back_inserter(left));
  return left;
}

}  // namespace zero::plan
