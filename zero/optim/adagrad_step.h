// The formula of Adagrad for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <array>
#include <cmath>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

template <class Number>
struct AdagradStep {
  Number l2, eps, negative_lr;
  Number initial;  ///< the first value of the sum; the first step adds it

  AdagradStep(const Adagrad& o, Moment moment)
      : l2(static_cast<Number>(o.weight_decay)),
        eps(static_cast<Number>(o.eps)),
        negative_lr(static_cast<Number>(-moment.lr /
                                        (1 + static_cast<double>(moment.step - 1) * o.lr_decay))),
        initial(static_cast<Number>(moment.step == 1 ? o.initial_accumulator_value : 0)) {}

  constexpr void apply(Number& p, Number g, std::array<Number, kMostStates>& state) const {
    auto& sum = state[0];
    if (l2 != 0) g += l2 * p;
    if (initial != 0) sum += initial;
    sum += g * g;
    p += negative_lr * g / (std::sqrt(sum) + eps);
  }
};

}  // namespace zero::optim
