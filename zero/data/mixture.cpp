#include "zero/data/mixture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "zero/base/error.h"

namespace zero {
namespace {

void check(const std::vector<double>& weights) {
  if (weights.empty() || std::ssize(weights) > Mixture::kBlock) {
    throw ConfigError(fmt::format("A mixture has 1 to {} data sets; there are {} weights.",
                                  Mixture::kBlock, weights.size()));
  }
  for (const double weight : weights) {
    if (std::isfinite(weight) && weight > 0) continue;
    throw ConfigError(
        fmt::format("A weight of the data is {} (of {}); each must be a number above 0. Leave out "
                    "data that are not to be used.",
                    weight, fmt::join(weights, ", ")));
  }
}

std::vector<int64_t> rounded(const std::vector<double>& weights) {
  // The largest is 1 then, so that no sum is infinite.
  const double largest = std::ranges::max(weights);
  double sum = 0;
  for (const double weight : weights) sum += weight / largest;
  std::vector<int64_t> counts;
  std::vector<double> remainders;
  for (const double weight : weights) {
    const double share = weight / largest / sum * static_cast<double>(Mixture::kBlock);
    counts.push_back(std::max<int64_t>(1, static_cast<int64_t>(share)));
    remainders.push_back(share - static_cast<double>(counts.back()));
  }
  auto left = Mixture::kBlock - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (; left > 0; --left) {
    const auto next = std::ranges::max_element(remainders) - remainders.begin();
    ++counts[static_cast<size_t>(next)];
    --remainders[static_cast<size_t>(next)];
  }
  for (; left < 0; ++left) --*std::ranges::max_element(counts);
  return counts;
}

}  // namespace

Mixture::Mixture(const std::vector<double>& weights) {
  check(weights);
  counts_ = rounded(weights);
  std::vector<int64_t> given(counts_.size());
  for (int64_t i = 0; i < kBlock; ++i) {
    size_t next = 0;
    const auto behind = [&](size_t source) {
      return counts_[source] * (i + 1) - kBlock * given[source];
    };
    for (size_t source = 1; source < counts_.size(); ++source) {
      if (behind(source) > behind(next)) next = source;
    }
    sources_.push_back(static_cast<uint16_t>(next));
    before_.push_back(static_cast<uint16_t>(given[next]++));
  }
}

Mixture::Place Mixture::operator()(int64_t sample) const {
  const auto within = static_cast<size_t>(sample % kBlock);
  const auto source = size_t{sources_[within]};
  return {source, sample / kBlock * counts_[source] + before_[within]};
}

}  // namespace zero
