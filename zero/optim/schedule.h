// Learning-rate schedules: each gives the rate of a step.
//
//   const auto schedule = optim::complete(optim::DeepSpeedWarmupCosine{.warmup_steps = 100},
//                                         {.lr = 3e-4, .steps = 5000});
//   engine.set_lr(optim::rate(schedule, engine.steps() + 1));
//
// Every schedule is a value with `double rate(int64_t step)`, where step 1 is the first update; an
// update that was skipped does not count. Nothing is advanced, so a resumed run needs only the
// step. Past its last step a schedule stays at its last rate, unless it says otherwise.
//
// Empty members are taken from the run (its rate, its steps, its warm-up): `complete` fills them
// in. If one is empty, `rate` throws a ConfigError that names it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

namespace zero::optim {

/// The ways in which a rate falls. wsd means warm-up, stable, decay (2404.06395): the rate stays
/// until the last steps.
enum class Decay { constant, linear, cosine, wsd };

/// A linear warm-up, then a decay. Step w of `warmup_steps` has rate lr * w / warmup_steps: the
/// first rate is not zero, and the last is `lr`. From there the rate falls, linearly or along half
/// a cosine, to `min_lr`, which step `total_steps` has. With Decay::wsd it stays at `lr` until the
/// last `decay_steps` steps, and falls linearly in them. With Decay::constant it stays at `lr`.
struct WarmupDecay {
  std::optional<double> lr{};
  double min_lr = 0.0;
  std::optional<int64_t> warmup_steps = 0;
  std::optional<int64_t> total_steps{};
  Decay decay = Decay::cosine;
  std::optional<int64_t> decay_steps{};  ///< for wsd; a tenth of `total_steps` if it is empty
  double rate(int64_t step) const;
  bool operator==(const WarmupDecay&) const = default;
};

// DeepSpeed 0.19.8 has these schedules (runtime/lr_schedules.py), with the same parameters,
// defaults and results. Its scheduler counts from the second update on: with k = step - 2, the
// first update has the rate that stands at k = -1.

enum class WarmupType { logarithmic, linear };

/// DeepSpeed's WarmupLR: min_lr + (max_lr - min_lr) * gamma. While k is below `warmup_steps`, gamma
/// is log(k + 1) / log(warmup_steps), or k / warmup_steps; then it is 1. Updates 1 and 2 both have
/// `min_lr`. A warm-up of 1 or 0 counts as 2, as in DeepSpeed.
struct DeepSpeedWarmup {
  double min_lr = 0.0;
  std::optional<double> max_lr{};
  std::optional<int64_t> warmup_steps = 1000;
  WarmupType type = WarmupType::logarithmic;
  double rate(int64_t step) const;
  bool operator==(const DeepSpeedWarmup&) const = default;
};

/// WarmupDecayLR: the same warm-up, after which gamma is (total_steps - k) / (total_steps -
/// warmup_steps), but not below 0.
struct DeepSpeedWarmupDecay {
  double min_lr = 0.0;
  std::optional<double> max_lr = 1e-3;
  std::optional<int64_t> warmup_steps = 1000;
  WarmupType type = WarmupType::logarithmic;
  std::optional<int64_t> total_steps{};
  double rate(int64_t step) const;
  bool operator==(const DeepSpeedWarmupDecay&) const = default;
};

/// WarmupCosineLR: the rate is `lr` times a ratio. The ratio is 0 for the first update. Then it
/// grows from `warmup_min_ratio` to 1 as DeepSpeedWarmup's gamma does, and falls along half a
/// cosine to `cos_min_ratio` at k = total_steps - 1.
struct DeepSpeedWarmupCosine {
  std::optional<double> lr{};
  double warmup_min_ratio = 0.0;
  double cos_min_ratio = 1e-4;
  std::optional<int64_t> warmup_steps = 1000;
  std::optional<int64_t> total_steps{};
  WarmupType type = WarmupType::logarithmic;
  double rate(int64_t step) const;
  bool operator==(const DeepSpeedWarmupCosine&) const = default;
};

/// Adam's two betas.
struct Betas {
  double beta1 = 0.9;
  double beta2 = 0.999;
  bool operator==(const Betas&) const = default;
};

/// OneCycle (1803.09820): the rate rises linearly from `min_lr` to `max_lr` over `first_steps`, and
/// falls back over `second_steps`. It does so in stairs if a count of them is given. n steps after
/// the cycle it is min_lr / (1 + decay_rate * n / decay_steps). With `cycle_momentum` beta1 moves
/// the other way, between `max_momentum` and `min_momentum`, and after the cycle it is max_momentum
/// * (1 + momentum_decay_rate * n / decay_steps); beta2 is 0.99, and the first update has
/// `min_momentum`, both as in DeepSpeed.
struct DeepSpeedOneCycle {
  double min_lr = 0.0;
  double max_lr = 1e-3;
  double decay_rate = 0.0;
  int64_t first_steps = 2000;
  std::optional<int64_t> second_steps{};  ///< the same as `first_steps` if empty
  int64_t first_stairs = 0;
  std::optional<int64_t> second_stairs{};
  int64_t decay_steps = 0;  ///< 0: no decay
  bool cycle_momentum = true;
  double min_momentum = 0.8;
  double max_momentum = 0.9;
  double momentum_decay_rate = 0.0;
  double rate(int64_t step) const;
  std::optional<Betas> betas(int64_t step) const;
  bool operator==(const DeepSpeedOneCycle&) const = default;
};

/// LRRangeTest (1506.01186): min_lr * (1 + step_rate * (step - 1) / step_size). With `staircase`
/// the quotient is rounded down.
struct DeepSpeedRangeTest {
  double min_lr = 1e-3;
  int64_t step_size = 2000;
  double step_rate = 1.0;
  bool staircase = false;
  double rate(int64_t step) const;
  bool operator==(const DeepSpeedRangeTest&) const = default;
};

using Schedule = std::variant<WarmupDecay, DeepSpeedWarmup, DeepSpeedWarmupDecay,
                              DeepSpeedWarmupCosine, DeepSpeedOneCycle, DeepSpeedRangeTest>;

/// The values of the run that a schedule takes where its own members are empty.
struct RunLength {
  double lr = 1e-3;   ///< the optimizer's rate
  int64_t steps = 0;  ///< updates of the run
  int64_t warmup_steps = 0;
};

/// Returns `schedule` with its empty members filled in from the run. Throws a ConfigError as
/// `check` does, and also if the run is so long that a momentum would grow to 1.
Schedule complete(Schedule schedule, const RunLength& run);

/// Returns the rate of update number `step` (1 for the first).
double rate(const Schedule& schedule, int64_t step);
/// Returns the betas of that update, or nothing if the schedule does not change them.
std::optional<Betas> betas(const Schedule& schedule, int64_t step);
/// Returns whether the schedule has rates of its own, so that the optimizer's rate changes none of
/// them.
bool ignores_optimizer_rate(const Schedule& schedule);

/// Throws a ConfigError that names the first value that cannot be used (a negative rate, a warm-up
/// longer than the whole, ...).
void check(const Schedule& schedule);

}  // namespace zero::optim
