#include "zero/optim/loss_scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "zero/base/error.h"

namespace zero {

namespace {

constexpr int64_t kMostSteps = int64_t{1} << 62;
constexpr double kMostScale = std::numeric_limits<float>::max();

template <class Value>
void require(bool holds, std::string_view key, Value value, std::string_view rule) {
  if (!holds)
    throw ConfigError(fmt::format("loss scale: {} is {}, but it must be {}.", key, value, rule));
}

}  // namespace

LossScale::LossScale(const LossScaling& rule) : rule_(rule) {
  require(rule.fixed >= 0 && rule.fixed <= kMostScale, "loss_scale", rule.fixed,
          "from 0 (dynamic) to the greatest number of fp32");
  if (!dynamic()) {
    state_.scale = rule.fixed;
    return;
  }
  require(rule.initial_power >= 0 && rule.initial_power <= 127, "initial_scale_power",
          rule.initial_power, "from 0 to 127, as fp32 goes");
  require(rule.window >= 1, "loss_scale_window", rule.window, "at least 1");
  require(rule.hysteresis >= 1, "hysteresis", rule.hysteresis, "at least 1");
  require(std::isfinite(rule.minimum) && rule.minimum >= 0, "min_loss_scale", rule.minimum,
          "a number of at least 0");
  require(std::isfinite(rule.growth) && rule.growth > 1, "growth", rule.growth, "more than 1");
  require(rule.backoff > 0 && rule.backoff < 1, "backoff", rule.backoff, "between 0 and 1");
  require(rule.maximum >= std::ldexp(1.0, static_cast<int>(rule.initial_power)), "maximum",
          rule.maximum, "at least the scale to begin with");
  require(rule.uncounted >= 0, "uncounted", rule.uncounted, "at least 0");
  state_ = {.scale = std::ldexp(1.0, static_cast<int>(rule.initial_power)),
            .clean = -rule.uncounted,
            .hysteresis = rule.hysteresis};
}

bool LossScale::update(bool overflow) {
  if (!dynamic()) return true;
  if (overflow) {
    if (state_.hysteresis > 1) {
      --state_.hysteresis;
    } else {
      if (state_.scale == rule_.minimum) return false;
      state_.scale = std::max(state_.scale * rule_.backoff, rule_.minimum);
    }
    state_.clean = -rule_.uncounted;
    return true;
  }
  if (rule_.consecutive_hysteresis) state_.hysteresis = rule_.hysteresis;
  ++state_.clean;
  if (state_.clean <= 0 || state_.clean % rule_.window != 0) return true;
  if (!rule_.consecutive_hysteresis) state_.hysteresis = rule_.hysteresis;
  if (state_.scale * rule_.growth <= rule_.maximum) state_.scale *= rule_.growth;
  return true;
}

void LossScale::restore(const LossScaleState& state) {
  if (!dynamic()) return;
  require(state.scale > 0 && state.scale <= kMostScale, "the scale of a checkpoint", state.scale,
          "above 0, and a number of fp32");
  require(state.clean >= -rule_.uncounted && state.clean <= kMostSteps,
          "the count of steps without overflow of a checkpoint", state.clean,
          fmt::format("from {} to {}", -rule_.uncounted, kMostSteps));
  require(state.hysteresis >= 1, "the hysteresis of a checkpoint", state.hysteresis, "at least 1");
  state_ = state;
  state_.hysteresis = std::min(state.hysteresis, rule_.hysteresis);
}

}  // namespace zero
