// The formulas of Muon's sweeps for one element: Note [An optimizer's file] in algorithm.h.
#pragma once

#include <array>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// Makes the first sweep. The weights are here the array that takes the direction.
template <class Number>
struct MuonDirection {
  Number momentum, one_minus_momentum;
  bool nesterov;

  MuonDirection(const Muon& o, Moment /*moment*/)
      : momentum(static_cast<Number>(o.momentum)),
        one_minus_momentum(static_cast<Number>(1 - o.momentum)),
        nesterov(o.nesterov) {}

  constexpr void apply(Number& direction, Number g, std::array<Number, kMostStates>& state) const {
    auto& buffer = state[0];
    buffer = momentum * buffer + one_minus_momentum * g;
    direction = nesterov ? one_minus_momentum * g + momentum * buffer : buffer;
  }
};

/// Makes the second sweep. The gradient is here the direction that was made from the whole matrix.
template <class Number>
struct MatrixStep {
  Number decay;  ///< factor of the weights, 1 - lr * weight_decay
  Number coefficient;

  template <class T>
  MatrixStep(const T& o, Moment moment)
      : decay(static_cast<Number>(1 - moment.lr * o.weight_decay)),
        coefficient(static_cast<Number>(-moment.lr * moment.ratio)) {}

  constexpr void apply(Number& p, Number g, std::array<Number, kMostStates>& /*state*/) const {
    p *= decay;
    p += coefficient * g;
  }
};

}  // namespace zero::optim
