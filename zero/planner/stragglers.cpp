#include "zero/planner/stragglers.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zero::plan {

double slowest_rank(const SpeedsDiffer& differ, int64_t ranks) {
  const double deviation =
      std::sqrt(std::log1p(differ.jitter * differ.jitter));  // of the logarithm
  const double mean = -deviation * deviation / 2;
  // The probability that a time with mean 1 is at most e^y.
  const auto at_most = [&](double y) {
    if (deviation == 0) return y >= 0 ? 1.0 : 0.0;
    return std::erfc((mean - y) / (deviation * std::numbers::sqrt2)) / 2;
  };
  const double straggler = std::log(differ.slower);
  const auto all_at_most = [&](double y) {
    const double one =
        (1 - differ.stragglers) * at_most(y) + differ.stragglers * at_most(y - straggler);
    return std::pow(one, static_cast<double>(ranks));
  };
  if (deviation == 0) {
    const double none = std::pow(1 - differ.stragglers, static_cast<double>(ranks));
    return none + (1 - none) * differ.slower;
  }
  // The mean is the integral of 1 - F^n over times, by the middles of short stretches of their
  // logarithms. A million ranks are within 5 deviations, so 9 leave nothing out.
  constexpr int kStretches = 4000;
  const double first = mean - 9 * deviation;
  const double last = mean + 9 * deviation + straggler;
  const double step = (last - first) / kStretches;
  double sum = std::exp(first);
  for (int i = 0; i < kStretches; ++i) {
    const double y = first + step * i;
    sum += (1 - all_at_most(y + step / 2)) * (std::exp(y + step) - std::exp(y));
  }
  return sum;
}

}  // namespace zero::plan
