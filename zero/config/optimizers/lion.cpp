#include "zero/config/optimizers/params.h"

namespace zero::fields {

template <>
const OptimizerSection<Lion>& optimizer_section() {
  constexpr Lion kDefaults{.lr = 1e-3, .beta2 = 0.999};  // DeepSpeed's
  static const OptimizerSection<Lion> section{
      .names = {{"Lion", kDefaults}, {"FusedLion", kDefaults}, {"DeepSpeedCPULion", kDefaults}},
      .rows = Params<Lion>()
                  .lr()
                  .betas("Share of the moving mean in the update, and in the next moving mean")
                  .weight_decay()
                  .ignored<bool>({"fp32_optimizer_states", "set_grad_none"})
                  .rows()};
  return section;
}

}  // namespace zero::fields
