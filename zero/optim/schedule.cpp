#include "zero/optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "zero/base/error.h"

namespace zero::optim {
namespace {

double as_double(int64_t value) { return static_cast<double>(value); }

/// From 1 at progress 0 to 0 at progress 1 and beyond, along half a cosine.
double half_cosine(double progress) {
  return (1 + std::cos(std::numbers::pi * std::min(progress, 1.0))) / 2;
}

/// DeepSpeed's scheduler is asked for the first rate before it has counted anything (at -1) and
/// counts once after each update, from 0.
int64_t iteration_of(int64_t step) { return step - 2; }

int64_t deepspeed_warmup_steps(int64_t configured) { return std::max<int64_t>(configured, 2); }

double warmup_gamma(WarmupType type, int64_t iteration, int64_t steps) {
  if (type == WarmupType::linear) return as_double(iteration) / as_double(steps);
  return std::log(as_double(iteration + 1)) / std::log(as_double(steps));
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

void check_one(const Constant& s) { require_rate("lr", s.lr); }

void check_one(const WarmupDecay& s) {
  require_rate("lr", s.lr);
  require_rate("min_lr", s.min_lr);
  require(s.warmup_steps >= 0, "warmup_steps", s.warmup_steps, "at least 0");
  if (s.decay == Decay::constant) return;
  require(s.min_lr <= s.lr, "min_lr", s.min_lr, fmt::format("at most lr, {}", s.lr));
  require(s.total_steps >= 1, "total_steps", s.total_steps, "at least 1");
  require(s.warmup_steps <= s.total_steps, "warmup_steps", s.warmup_steps,
          fmt::format("at most total_steps, {}", s.total_steps));
}

void check_one(const DeepSpeedWarmup& s) {
  require_rate("warmup_min_lr", s.min_lr);
  require_rate("warmup_max_lr", s.max_lr);
  require(s.warmup_steps >= 1, "warmup_num_steps", s.warmup_steps, "at least 1");
  if (s.total_steps) require(*s.total_steps >= 1, "total_num_steps", *s.total_steps, "at least 1");
}

void check_one(const DeepSpeedWarmupCosine& s) {
  require_rate("lr", s.lr);
  require_rate("warmup_min_ratio", s.warmup_min_ratio);
  require_rate("cos_min_ratio", s.cos_min_ratio);
  require(s.warmup_steps >= 1, "warmup_num_steps", s.warmup_steps, "at least 1");
  require(s.total_steps >= 1, "total_num_steps", s.total_steps, "at least 1");
}

}  // namespace

double Constant::rate(int64_t) const { return lr; }

double WarmupDecay::rate(int64_t step) const {
  step = std::max<int64_t>(step, 1);
  if (step <= warmup_steps) return lr * as_double(step) / as_double(warmup_steps);
  if (decay == Decay::constant) return lr;
  if (step >= total_steps) return min_lr;
  const double progress = as_double(step - warmup_steps) / as_double(total_steps - warmup_steps);
  const double left = decay == Decay::linear ? 1 - progress : half_cosine(progress);
  return min_lr + (lr - min_lr) * left;
}

double DeepSpeedWarmup::rate(int64_t step) const {
  const int64_t iteration = iteration_of(step);
  if (iteration < 0) return min_lr;
  const int64_t warmup = deepspeed_warmup_steps(warmup_steps);
  double gamma = 1;
  if (iteration < warmup) {
    gamma = warmup_gamma(type, iteration, warmup);
  } else if (total_steps) {
    gamma = std::max(0.0, as_double(*total_steps - iteration) /
                              as_double(std::max<int64_t>(1, *total_steps - warmup)));
  }
  return min_lr + (max_lr - min_lr) * gamma;
}

double DeepSpeedWarmupCosine::rate(int64_t step) const {
  const int64_t iteration = iteration_of(step);
  if (iteration < 0) return 0;
  const int64_t warmup = deepspeed_warmup_steps(warmup_steps);
  if (iteration < warmup) {
    return lr * std::lerp(warmup_min_ratio, 1.0, warmup_gamma(type, iteration, warmup));
  }
  const double progress =
      as_double(iteration - warmup + 1) / as_double(std::max<int64_t>(1, total_steps - warmup));
  return lr * std::lerp(cos_min_ratio, 1.0, half_cosine(progress));
}

double rate(const Schedule& schedule, int64_t step) {
  return std::visit([step](const auto& s) { return s.rate(step); }, schedule);
}

void check(const Schedule& schedule) {
  std::visit([](const auto& s) { check_one(s); }, schedule);
}

}  // namespace zero::optim
