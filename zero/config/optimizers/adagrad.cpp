#include "zero/config/optimizers/params.h"

namespace zero::fields {

template <>
const OptimizerSection<Adagrad>& optimizer_section() {
  static const OptimizerSection<Adagrad> section{
      .names = {{"Adagrad"}, {"DeepSpeedCPUAdagrad"}},
      .rows =
          Params<Adagrad>()
              .lr()
              .add("lr_decay", &Adagrad::lr_decay,
                   {.sentence = "Decay of the rate: update n divides it by 1 + (n - 1) lr_decay"})
              .weight_decay("It is added to the gradient.")
              .add("initial_accumulator_value", &Adagrad::initial_accumulator_value,
                   {.sentence = "First value of the sum of squared gradients"})
              .add("eps", &Adagrad::eps,
                   {.sentence = "Added to the root of the sum of squared gradients"})
              .ignored<bool>({"fp32_optimizer_states"})
              .lacking({"amsgrad"})
              .ignored<bool>({"foreach", "fused"})
              .lacking({"maximize"})
              .rows()};
  return section;
}

}  // namespace zero::fields
