// Learning-rate schedules: a step in, a rate out.
//
// Every schedule is a value with `double rate(int64_t step)`, where step 1 is the first update.
// Nothing is advanced, so a resumed run needs only the step. Past its last step a schedule stays at
// its last rate.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

namespace zero::optim {

/// The same rate for ever.
struct Constant {
  double lr = 1e-3;
  double rate(int64_t step) const;
};

enum class Decay { constant, linear, cosine };

/// Linear warm-up, then decay. Step w of `warmup_steps` has rate lr * w / warmup_steps: the first
/// is not zero, the last is `lr`. From there the rate falls, linearly or along half a cosine, to
/// `min_lr`, which step `total_steps` has. With Decay::constant it stays at `lr`.
struct WarmupDecay {
  double lr = 1e-3;
  double min_lr = 0.0;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  Decay decay = Decay::cosine;
  double rate(int64_t step) const;
};

enum class WarmupType { logarithmic, linear };

/// DeepSpeed's WarmupLR and, with `total_steps`, its WarmupDecayLR. Its scheduler counts from the
/// second update on, so with k = max(step - 2, 0) (updates 1 and 2 both have `min_lr`) the rate is
/// min_lr + (max_lr - min_lr) * gamma. While k is below `warmup_steps`, gamma is log(k + 1) /
/// log(warmup_steps), or k / warmup_steps; then it is 1, or, with `total_steps`, (total_steps - k)
/// / (total_steps - warmup_steps), not below 0. A warm-up of 1 counts as 2, as there.
struct DeepSpeedWarmup {
  double min_lr = 0.0;
  double max_lr = 1e-3;
  int64_t warmup_steps = 1000;
  WarmupType type = WarmupType::logarithmic;
  std::optional<int64_t> total_steps = std::nullopt;
  double rate(int64_t step) const;
};

/// DeepSpeed's WarmupCosineLR: `lr` times a ratio, which is 0 for the first update, then grows from
/// `warmup_min_ratio` to 1 as DeepSpeedWarmup's gamma does, then falls along half a cosine to
/// `cos_min_ratio` at k = total_steps - 1.
struct DeepSpeedWarmupCosine {
  double lr = 1e-3;
  double warmup_min_ratio = 0.0;
  double cos_min_ratio = 1e-4;
  int64_t warmup_steps = 1000;
  int64_t total_steps = 10000;
  WarmupType type = WarmupType::logarithmic;
  double rate(int64_t step) const;
};

using Schedule = std::variant<Constant, WarmupDecay, DeepSpeedWarmup, DeepSpeedWarmupCosine>;

/// The rate of update number `step` (1 for the first).
double rate(const Schedule& schedule, int64_t step);

/// Throws ConfigError naming the first value that cannot be used (a negative rate, a warm-up longer
/// than the whole, ...).
void check(const Schedule& schedule);

}  // namespace zero::optim
