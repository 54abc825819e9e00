#include "zero/train/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "zero/base/error.h"

namespace zero::train {
namespace {

constexpr std::array<std::string_view, 3> kNames{"constant", "linear", "cosine"};

}  // namespace

Decay decay_from(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found != kNames.end()) return static_cast<Decay>(found - kNames.begin());
  const std::vector<std::string> known(kNames.begin(), kNames.end());
  throw ConfigError(fmt::format("The schedule is '{}'; it should be constant, linear or cosine.{}",
                                name, did_you_mean(name, known)));
}

std::string_view name(Decay decay) { return kNames[static_cast<size_t>(decay)]; }

double Schedule::rate(int64_t step) const {
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  if (decay == Decay::constant) return peak;
  const auto decaying = std::max<int64_t>(1, steps - warmup);
  const double done =
      std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(decaying));
  const double left =
      decay == Decay::linear ? 1 - done : (1 + std::cos(std::numbers::pi * done)) / 2;
  return floor + (peak - floor) * left;
}

}  // namespace zero::train
