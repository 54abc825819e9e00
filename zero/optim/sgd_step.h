// The formula of Sgd for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <array>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

template <class Number>
struct SgdStep {
  Number l2, momentum, one_minus_dampening, negative_lr;
  bool keeps;  ///< there is a momentum buffer
  bool first;  ///< this is the first step: the buffer becomes the gradient
  bool nesterov;

  SgdStep(const Sgd& o, Moment moment)
      : l2(static_cast<Number>(o.weight_decay)),
        momentum(static_cast<Number>(o.momentum)),
        one_minus_dampening(static_cast<Number>(1 - o.dampening)),
        negative_lr(static_cast<Number>(-moment.lr)),
        keeps(o.momentum != 0),
        first(moment.step == 1),
        nesterov(o.nesterov) {}

  constexpr void apply(Number& p, Number g, std::array<Number, kMostStates>& state) const {
    auto& buffer = state[0];
    if (l2 != 0) g += l2 * p;
    if (keeps) {
      buffer = first ? g : momentum * buffer + one_minus_dampening * g;
      g = nesterov ? g + momentum * buffer : buffer;
    }
    p += negative_lr * g;
  }
};

}  // namespace zero::optim
