// The formula of Lion for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <array>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

template <class Number>
struct LionStep {
  Number decay;  ///< factor of the weights, 1 - lr * weight_decay
  Number beta1, one_minus_beta1;
  Number beta2, one_minus_beta2;
  Number lr;

  LionStep(const Lion& o, Moment moment)
      : decay(static_cast<Number>(1 - moment.lr * o.weight_decay)),
        beta1(static_cast<Number>(o.beta1)),
        one_minus_beta1(static_cast<Number>(1 - o.beta1)),
        beta2(static_cast<Number>(o.beta2)),
        one_minus_beta2(static_cast<Number>(1 - o.beta2)),
        lr(static_cast<Number>(moment.lr)) {}

  constexpr void apply(Number& p, Number g, std::array<Number, kMostStates>& state) const {
    auto& m = state[0];
    const Number mean = beta1 * m + one_minus_beta1 * g;
    m = beta2 * m + one_minus_beta2 * g;
    p *= decay;
    if (mean > 0) p -= lr;
    if (mean < 0) p += lr;
  }
};

}  // namespace zero::optim
