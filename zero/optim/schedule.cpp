#include "zero/optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "zero/base/error.h"

namespace zero::optim {
namespace {

double as_double(int64_t value) { return static_cast<double>(value); }

/// Returns the value of a schedule's member. It throws if the member is empty and the run has not
/// filled it in.
template <class Value>
Value known(const std::optional<Value>& value, std::string_view name) {
  if (!value) {
    throw ConfigError(fmt::format(
        "schedule: {} is left to the run. Set it, or call zero::optim::complete first.", name));
  }
  return *value;
}

/// Returns 1 at progress 0, and falls along half a cosine to 0 at progress 1; then it stays 0.
double half_cosine(double progress) {
  return (1 + std::cos(std::numbers::pi * std::min(progress, 1.0))) / 2;
}

/// Returns the count of DeepSpeed's scheduler. It is asked for the first rate at -1, and counts
/// once after each update.
int64_t iteration_of(int64_t step) { return step - 2; }

int64_t deepspeed_warmup_steps(const std::optional<int64_t>& configured) {
  return std::max<int64_t>(known(configured, "warmup_num_steps"), 2);
}

double warmup_gamma(WarmupType type, int64_t iteration, int64_t steps) {
  if (type == WarmupType::linear) return as_double(iteration) / as_double(steps);
  return 1.0 / std::log(as_double(steps)) * std::log(as_double(iteration + 1));
}

int64_t decay_steps_of(const WarmupDecay& s) {
  const auto total = known(s.total_steps, "total_steps");
  return s.decay_steps.value_or(std::max<int64_t>(1, total / 10));
}

template <class T>
void require(bool holds, std::string_view key, T value, std::string_view rule) {
  if (!holds) {
    throw ConfigError(fmt::format("schedule: {} is {}, but it must be {}", key, value, rule));
  }
}

void require_rate(std::string_view key, double value) {
  require(std::isfinite(value) && value >= 0, key, value, "a number of at least 0");
}
void require_rate(std::string_view key, const std::optional<double>& value) {
  if (value) require_rate(key, *value);
}
void require_steps(std::string_view key, const std::optional<int64_t>& value, int64_t least) {
  if (value) require(*value >= least, key, *value, fmt::format("at least {}", least));
}

void check_one(const WarmupDecay& s) {
  require_rate("lr", s.lr);
  require_rate("min_lr", s.min_lr);
  require_steps("warmup_steps", s.warmup_steps, 0);
  if (s.decay == Decay::constant) return;
  if (s.lr) require(s.min_lr <= *s.lr, "min_lr", s.min_lr, fmt::format("at most lr, {}", *s.lr));
  require_steps("total_steps", s.total_steps, 1);
  require_steps("decay_steps", s.decay_steps, 1);
  if (!s.warmup_steps || !s.total_steps) return;
  require(*s.warmup_steps <= *s.total_steps, "warmup_steps", *s.warmup_steps,
          fmt::format("at most total_steps, {}", *s.total_steps));
  if (s.decay == Decay::wsd && s.decay_steps) {
    require(
        *s.decay_steps <= *s.total_steps - *s.warmup_steps, "decay_steps", *s.decay_steps,
        fmt::format("at most the steps after the warm-up, {}", *s.total_steps - *s.warmup_steps));
  }
}

void check_one(const DeepSpeedWarmup& s) {
  require_rate("warmup_min_lr", s.min_lr);
  require_rate("warmup_max_lr", s.max_lr);
  require_steps("warmup_num_steps", s.warmup_steps, 0);
}

void check_one(const DeepSpeedWarmupDecay& s) {
  require_rate("warmup_min_lr", s.min_lr);
  require_rate("warmup_max_lr", s.max_lr);
  require_steps("warmup_num_steps", s.warmup_steps, 0);
  require_steps("total_num_steps", s.total_steps, 1);
}

void check_one(const DeepSpeedWarmupCosine& s) {
  require_rate("lr", s.lr);
  require_rate("warmup_min_ratio", s.warmup_min_ratio);
  require_rate("cos_min_ratio", s.cos_min_ratio);
  require_steps("warmup_num_steps", s.warmup_steps, 0);
  require_steps("total_num_steps", s.total_steps, 1);
}

void check_one(const DeepSpeedOneCycle& s) {
  require_rate("cycle_min_lr", s.min_lr);
  require_rate("cycle_max_lr", s.max_lr);
  require_rate("decay_lr_rate", s.decay_rate);
  require_steps("cycle_first_step_size", s.first_steps, 1);
  require_steps("cycle_second_step_size", s.second_steps, 0);
  require_steps("cycle_first_stair_count", s.first_stairs, 0);
  require_steps("cycle_second_stair_count", s.second_stairs, 0);
  require_steps("decay_step_size", s.decay_steps, 0);
  const auto require_momentum = [](std::string_view key, double value) {
    require(value >= 0 && value < 1, key, value, "at least 0 and less than 1");
  };
  require_momentum("cycle_min_mom", s.min_momentum);
  require_momentum("cycle_max_mom", s.max_momentum);
  require_rate("decay_mom_rate", s.momentum_decay_rate);
}

void check_one(const DeepSpeedRangeTest& s) {
  require_rate("lr_range_test_min_lr", s.min_lr);
  require_steps("lr_range_test_step_size", s.step_size, 1);
  require_rate("lr_range_test_step_rate", s.step_rate);
}

/// Returns how far up the cycle the rate is before update `step`, from 0 to 1.
double cycle_position(const DeepSpeedOneCycle& s, int64_t step) {
  const double batch = as_double(iteration_of(step) + 1);
  const double first = as_double(s.first_steps);
  const double second = as_double(s.second_steps.value_or(s.first_steps));
  const double total = first + second;
  const double peak = first / total;
  const double x = 1.0 + batch / total - std::floor(1 + batch / total);
  const bool rises = x <= peak;
  const auto stairs = rises ? s.first_stairs : s.second_stairs.value_or(s.first_stairs);
  if (stairs == 0) return rises ? x / peak : (x - 1) / (peak - 1);
  // The stairs are computed from whole steps, so that no rounding costs a stair.
  const double in_cycle = std::fmod(batch, total);
  const double climbed = in_cycle <= first ? in_cycle * as_double(stairs) / first
                                           : (total - in_cycle) * as_double(stairs) / second;
  return std::floor(climbed) / as_double(stairs);
}

/// Returns the steps of the decay after the cycle; 0 in the cycle.
int64_t steps_after_cycle(const DeepSpeedOneCycle& s, int64_t step) {
  const int64_t total = s.first_steps + s.second_steps.value_or(s.first_steps);
  return std::max<int64_t>(0, iteration_of(step) - total + 1);
}

}  // namespace

double WarmupDecay::rate(int64_t step) const {
  const double peak = known(lr, "lr");
  const auto warmup = known(warmup_steps, "warmup_steps");
  step = std::max<int64_t>(step, 1);
  if (step <= warmup) return peak * as_double(step) / as_double(warmup);
  if (decay == Decay::constant) return peak;
  const auto total = known(total_steps, "total_steps");
  if (step >= total) return min_lr;
  const auto begin = decay == Decay::wsd ? std::max(warmup, total - decay_steps_of(*this)) : warmup;
  if (step <= begin) return peak;
  const double progress = as_double(step - begin) / as_double(total - begin);
  const double left = decay == Decay::cosine ? half_cosine(progress) : 1 - progress;
  return min_lr + (peak - min_lr) * left;
}

double DeepSpeedWarmup::rate(int64_t step) const {
  const int64_t iteration = iteration_of(step);
  if (iteration < 0) return min_lr;
  const int64_t warmup = deepspeed_warmup_steps(warmup_steps);
  const double gamma = iteration < warmup ? warmup_gamma(type, iteration, warmup) : 1;
  return min_lr + (known(max_lr, "warmup_max_lr") - min_lr) * gamma;
}

double DeepSpeedWarmupDecay::rate(int64_t step) const {
  const int64_t iteration = iteration_of(step);
  if (iteration < 0) return min_lr;
  const int64_t warmup = deepspeed_warmup_steps(warmup_steps);
  const int64_t total = known(total_steps, "total_num_steps");
  const double gamma = iteration < warmup
                           ? warmup_gamma(type, iteration, warmup)
                           : std::max(0.0, as_double(total - iteration) /
                                               as_double(std::max<int64_t>(1, total - warmup)));
  return min_lr + (known(max_lr, "warmup_max_lr") - min_lr) * gamma;
}

double DeepSpeedWarmupCosine::rate(int64_t step) const {
  const int64_t iteration = iteration_of(step);
  if (iteration < 0) return 0;
  const double peak = known(lr, "lr");
  const int64_t warmup = deepspeed_warmup_steps(warmup_steps);
  if (iteration < warmup) {
    const double gamma = warmup_gamma(type, iteration, warmup);
    return peak * (warmup_min_ratio + gamma * (1 - warmup_min_ratio));
  }
  const int64_t total = known(total_steps, "total_num_steps");
  const double progress =
      as_double(iteration - warmup + 1) / as_double(std::max<int64_t>(1, total - warmup));
  return peak * (cos_min_ratio + (1 - cos_min_ratio) * half_cosine(progress));
}

double DeepSpeedOneCycle::rate(int64_t step) const {
  step = std::max<int64_t>(step, 1);
  const auto after = steps_after_cycle(*this, step);
  if (after == 0) return min_lr + (max_lr - min_lr) * cycle_position(*this, step);
  if (decay_steps == 0 || decay_rate == 0) return min_lr;
  return min_lr / (1 + decay_rate * (as_double(after) / as_double(decay_steps)));
}

std::optional<Betas> DeepSpeedOneCycle::betas(int64_t step) const {
  if (!cycle_momentum) return std::nullopt;
  constexpr double kBeta2 = 0.99;
  if (step <= 1) return Betas{min_momentum, kBeta2};
  const auto after = steps_after_cycle(*this, step);
  if (after == 0) {
    const double fallen = (max_momentum - min_momentum) * cycle_position(*this, step);
    return Betas{max_momentum - fallen, kBeta2};
  }
  if (decay_steps == 0 || momentum_decay_rate == 0) return Betas{max_momentum, kBeta2};
  const double factor = 1 + momentum_decay_rate * (as_double(after) / as_double(decay_steps));
  return Betas{max_momentum * factor, kBeta2};
}

double DeepSpeedRangeTest::rate(int64_t step) const {
  double interval = as_double(std::max<int64_t>(step, 1) - 1) / as_double(step_size);
  if (staircase) interval = std::floor(interval);
  return min_lr * (1 + step_rate * interval);
}

Schedule complete(Schedule schedule, const RunLength& run) {
  const auto fill = [](auto& member, auto value) {
    if (!member) member = value;
  };
  std::visit(
      [&](auto& s) {
        if constexpr (requires { s.lr; }) fill(s.lr, run.lr);
        if constexpr (requires { s.max_lr.has_value(); }) fill(s.max_lr, run.lr);
        if constexpr (requires { s.warmup_steps; }) fill(s.warmup_steps, run.warmup_steps);
        if constexpr (requires { s.total_steps; }) fill(s.total_steps, run.steps);
      },
      schedule);
  check(schedule);
  if (const auto last = betas(schedule, run.steps); last && last->beta1 >= 1) {
    throw ConfigError(fmt::format(
        "scheduler.params.decay_mom_rate makes Adam's beta1 {} by update {}, the run's last; it "
        "must stay below 1. A smaller rate, a larger decay_step_size or cycle_momentum false do "
        "so.",
        last->beta1, run.steps));
  }
  return schedule;
}

double rate(const Schedule& schedule, int64_t step) {
  return std::visit([step](const auto& s) { return s.rate(step); }, schedule);
}

std::optional<Betas> betas(const Schedule& schedule, int64_t step) {
  const auto* cycle = std::get_if<DeepSpeedOneCycle>(&schedule);
  return cycle != nullptr ? cycle->betas(step) : std::nullopt;
}

bool ignores_optimizer_rate(const Schedule& schedule) {
  return std::visit(
      [](const auto& s) {
        if constexpr (requires { s.lr; }) return s.lr.has_value();
        if constexpr (requires { s.max_lr.has_value(); }) return s.max_lr.has_value();
        return true;
      },
      schedule);
}

void check(const Schedule& schedule) {
  std::visit([](const auto& s) { check_one(s); }, schedule);
}

}  // namespace zero::optim
