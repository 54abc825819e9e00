// The formula of AdamW and Adam for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <array>
#include <cmath>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

template <class Number>
struct AdamWStep {
  Number decay;  ///< factor of the weights: 1 - lr * weight_decay; 1 if the decay is not decoupled
  Number l2;     ///< weight_decay if the decay is not decoupled; otherwise 0
  Number beta1, one_minus_beta1;
  Number beta2, one_minus_beta2;
  Number inverse_root_correction2;  ///< 1 / sqrt(1 - beta2^step)
  Number eps;
  Number negative_step_size;  ///< -lr / (1 - beta1^step)

  AdamWStep(const AdamW& o, Moment moment) {
    const auto correction = [&](double beta) {
      return o.bias_correction ? 1 - std::pow(beta, static_cast<double>(moment.step)) : 1;
    };
    decay = static_cast<Number>(o.decoupled ? 1 - moment.lr * o.weight_decay : 1);
    l2 = static_cast<Number>(o.decoupled ? 0 : o.weight_decay);
    beta1 = static_cast<Number>(o.beta1);
    one_minus_beta1 = static_cast<Number>(1 - o.beta1);
    beta2 = static_cast<Number>(o.beta2);
    one_minus_beta2 = static_cast<Number>(1 - o.beta2);
    inverse_root_correction2 = static_cast<Number>(1 / std::sqrt(correction(o.beta2)));
    eps = static_cast<Number>(o.eps);
    negative_step_size = static_cast<Number>(-moment.lr / correction(o.beta1));
  }

  constexpr void apply(Number& p, Number g, std::array<Number, kMostStates>& state) const {
    auto& [m, v] = state;
    if (l2 != 0) g += l2 * p;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * g * g;
    p *= decay;
    p += negative_step_size * m / (std::sqrt(v) * inverse_root_correction2 + eps);
  }
};

}  // namespace zero::optim
