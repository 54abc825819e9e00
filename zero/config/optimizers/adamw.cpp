#include "zero/config/optimizers/params.h"

namespace zero::fields {

// DeepSpeed's names mean fused Adam, whose weight decay is 0 if a file gives none. Its "Adam"
// decays like AdamW unless adam_w_mode is false, and its "AdamW" always does.
template <>
const OptimizerSection<AdamW>& optimizer_section() {
  constexpr AdamW kDefaults{.weight_decay = 0};
  static const OptimizerSection<AdamW> section{
      .names = {{"AdamW", kDefaults, false, [](AdamW& adam) { adam.decoupled = true; }},
                {"Adam", kDefaults},
                {"FusedAdam", kDefaults},
                {"DeepSpeedCPUAdam", kDefaults},
                {"OneBitAdam", kDefaults, true},
                {"ZeroOneAdam", kDefaults, true}},
      .rows =
          Params<AdamW>()
              .lr()
              .betas("Decay rates of the two moments, each at least 0 and less than 1")
              .add("eps", &AdamW::eps, {.sentence = "Added to the root of the second moment"})
              .weight_decay("If a file leaves it out, it is 0, as in DeepSpeed.")
              .add("adam_w_mode", &AdamW::decoupled,
                   {.sentence = "Apply weight decay to the weight and not to the gradient (AdamW)",
                    .details = "\"AdamW\" always does this, as in DeepSpeed.",
                    .also = {"adamw_mode"}})
              .add("bias_correction", &AdamW::bias_correction,
                   {.sentence = "Correct the moments for their start at 0"})
              .ignored<bool>({"torch_adam", "fp32_optimizer_states", "foreach", "fused",
                              "set_grad_none", "cuda_aware"})
              .ignored<std::string>({"comm_backend_name"})
              .of_compression({"freeze_step", "var_freeze_step", "var_update_scaler",
                               "local_step_scaler", "local_step_clipper"})
              .clipped_by_engine()
              .lacking({"amsgrad", "maximize"})
              .rows()};
  return section;
}

}  // namespace zero::fields
