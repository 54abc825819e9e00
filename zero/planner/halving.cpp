#include "zero/planner/halving.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace zero::plan {
namespace {

// Returns the value below which `part` of a distribution lies, by a sorted sample. This estimate is
// as often too high as too low, whatever the distribution (Hyndman and Fan's eighth). Those that
// are usual for large samples put the quartiles of four steps too near to each other.
double quantile(const std::vector<double>& sorted, double part) {
  const auto last = static_cast<double>(sorted.size() - 1);
  const double at = (last + 4.0 / 3) * part - 2.0 / 3;
  const double place = std::clamp(at, 0.0, last);
  const auto below = static_cast<size_t>(place);
  const auto above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - std::floor(place));
}

}  // namespace

Speed speed_of_steps(std::vector<double> seconds) {
  if (std::ssize(seconds) < kFewestSteps) {
    return {.failure =
                fmt::format("It has {} steps that were timed; a speed needs at least {} of them.",
                            seconds.size(), kFewestSteps)};
  }
  std::ranges::sort(seconds);
  constexpr double kOfMedian = 1.2533 / 0.6745;  // Note [Noise of a median]
  const double half = (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / 2;
  return {.seconds = quantile(seconds, 0.5),
          .standard_error = kOfMedian * half / std::sqrt(static_cast<double>(seconds.size()))};
}

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
    if (last.seconds - first.seconds <= std::hypot(first.standard_error, last.standard_error)) {
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
