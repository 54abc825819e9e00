// The parts of the sweeps of Muon and Apollo that both have: Note [Two sweeps] in sweeps.h.
#pragma once

#include <cstdint>

#include "zero/optim/algorithm.h"
#include "zero/optim/moment.h"
#include "zero/optim/muon_step.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {

/// Runs the kernel of MatrixStep over elements [begin, end).
void update_matrix(const MatrixStep<float>& step, const Operands& operands, int64_t begin,
                   int64_t end);

/// Does what Algorithm::beside_matrices does.
template <class T>
AdamW adamw_beside(const T& o) {
  return {.lr = o.adam_lr.value_or(o.lr),
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay};
}

/// Returns the operands with the array of directions in the place of the weights.
inline Operands to_direction(const Operands& operands, float* direction) {
  auto to = operands;
  to.master = direction;
  to.lower = nullptr;
  to.parameter = nullptr;
  return to;
}

/// Is Algorithm::first_sweep_reference of an optimizer whose directions `Direction` makes.
template <template <class> class Direction, class T>
void plain_direction(const T& optimizer, Moment moment, float gradient_scale,
                     const Operands& operands, Findings& findings) {
  plain_update<Direction>(optimizer, moment, gradient_scale,
                          to_direction(operands, findings.direction));
}

/// Is Algorithm::update.
template <class T>
void second_sweep(const T& optimizer, Moment moment, float /*gradient_scale*/,
                  const Operands& operands, int64_t begin, int64_t end) {
  update_matrix(MatrixStep<float>(optimizer, moment), operands, begin, end);
}

}  // namespace zero::optim
