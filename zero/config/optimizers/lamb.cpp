#include "zero/config/optimizers/params.h"

namespace zero::fields {

template <>
const OptimizerSection<Lamb>& optimizer_section() {
  static const OptimizerSection<Lamb> section{
      .names = {{"Lamb"}, {"FusedLamb"}, {"OneBitLamb", {}, true}},
      .rows = Params<Lamb>()
                  .lr()
                  .betas("Decay rates of the two moments")
                  .add("eps", &Lamb::eps, {.sentence = "Added to the root of the second moment"})
                  .add("eps_inside_sqrt", &Lamb::eps_inside_sqrt,
                       {.sentence = "Add eps to the second moment before the root is taken"})
                  .weight_decay("It is part of the update whose norm is taken.")
                  .add("min_coeff", &Lamb::min_coeff,
                       {.sentence = "Smallest trust ratio (the norm of a parameter divided by that "
                                    "of its update)"})
                  .add("max_coeff", &Lamb::max_coeff, {.sentence = "Largest trust ratio"})
                  .add("bias_correction", &Lamb::bias_correction,
                       {.sentence =
                            "Correct the moments for their start at 0, by a factor of the rate"})
                  .clipped_by_engine()
                  .lacking({"amsgrad"})
                  .ignored<bool>({"cuda_aware"})
                  .ignored<std::string>({"comm_backend_name"})
                  .of_compression(
                      {"freeze_step", "coeff_beta", "factor_max", "factor_min", "factor_threshold"})
                  .rows()};
  return section;
}

}  // namespace zero::fields
