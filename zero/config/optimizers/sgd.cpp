#include "zero/config/optimizers/params.h"

namespace zero::fields {

template <>
const OptimizerSection<Sgd>& optimizer_section() {
  static const OptimizerSection<Sgd> section{
      .names = {{"SGD"}},
      .rows = Params<Sgd>()
                  .lr()
                  .add("momentum", &Sgd::momentum,
                       {.sentence = "Momentum of the running sum of gradients"})
                  .add("dampening", &Sgd::dampening,
                       {.sentence = "Part of a gradient that is not added to the running sum"})
                  .weight_decay()
                  .add("nesterov", &Sgd::nesterov,
                       {.sentence = "Use Nesterov's form; needs `momentum`, and `dampening` 0"})
                  .ignored<bool>({"foreach", "fused"})
                  .lacking({"maximize"})
                  .rows()};
  return section;
}

}  // namespace zero::fields
