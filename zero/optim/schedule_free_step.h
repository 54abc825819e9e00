// The formula of schedule-free AdamW for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

template <class Number>
struct ScheduleFreeStep {
  bool first;  ///< z begins as the weights
  Number beta2, one_minus_beta2;
  Number inverse_root_correction2;  ///< 1 / sqrt(1 - beta2^step)
  Number eps;
  Number decay;          ///< weight_decay
  Number share;          ///< c, the share of the new z in the mean
  Number negative_lr;    ///< the step of z along the direction
  Number step_of_mixed;  ///< that of y: (1 - beta1 (1 - c)) * negative_lr

  ScheduleFreeStep(const ScheduleFreeAdamW& o, Moment moment)
      : first(moment.step == 1),
        beta2(static_cast<Number>(o.beta2)),
        one_minus_beta2(static_cast<Number>(1 - o.beta2)),
        inverse_root_correction2(static_cast<Number>(
            1 / std::sqrt(1 - std::pow(o.beta2, static_cast<double>(moment.step))))),
        eps(static_cast<Number>(o.eps)),
        decay(static_cast<Number>(o.weight_decay)),
        share(static_cast<Number>(share_of(o, moment.step))),
        negative_lr(static_cast<Number>(-rate_of(o, moment))),
        step_of_mixed(static_cast<Number>((1 - o.beta1 * (1 - share_of(o, moment.step))) *
                                          -rate_of(o, moment))) {}

  /// Returns the rate of a step, with the warm-up.
  static double rate_of(const ScheduleFreeAdamW& o, Moment moment) {
    const int64_t warmup = o.warmup_steps.value_or(0);
    if (moment.step >= warmup) return moment.lr;
    return moment.lr * static_cast<double>(moment.step) / static_cast<double>(warmup);
  }
  /// Returns c of a step. The sum of the squares 1 to n is n (n + 1) (2 n + 1) / 6.
  static double share_of(const ScheduleFreeAdamW& o, int64_t step) {
    const auto t = static_cast<double>(step);
    const int64_t warmup = o.warmup_steps.value_or(0);
    const auto warm = static_cast<double>(std::min(step, warmup));
    if (step <= warmup) return 6 * t / ((t + 1) * (2 * t + 1));
    const double before = warm > 0 ? (warm + 1) * (2 * warm + 1) / (6 * warm) : 0;
    return 1 / (before + t - warm);
  }

  constexpr void apply(Number& y, Number g, std::array<Number, kMostStates>& state) const {
    auto& [z, v] = state;
    if (first) z = y;
    v = beta2 * v + one_minus_beta2 * g * g;
    const Number direction = g / (std::sqrt(v) * inverse_root_correction2 + eps) + decay * y;
    y += share * (z - y);
    y += step_of_mixed * direction;
    z += negative_lr * direction;
  }
};

}  // namespace zero::optim
