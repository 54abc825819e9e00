#include "zero/config/optimizers/params.h"

namespace zero::fields {

// A file's defaults are those of DeepSpeed 0.19's Muon, whose AdamW has a rate of its own.
template <>
const OptimizerSection<Muon>& optimizer_section() {
  static const OptimizerSection<Muon> section{
      .names = {{"Muon", {.adam_lr = 3e-4, .beta2 = 0.95, .eps = 1e-10}}},
      .rows =
          Params<Muon>()
              .add("lr", &Muon::lr,
                   +[](Muon& muon, double lr) {
                     muon.lr = lr;
                     muon.adam_lr.reset();
                   },
                   {.sentence = "Learning rate; in `zero train` the peak of the schedule",
                    .option = "--lr"})
              .add(
                  "muon_lr", &Muon::lr,
                  +[](Muon& muon, double lr) {
                    if (!muon.adam_lr) muon.adam_lr = muon.lr;
                    muon.lr = lr;
                  },
                  {.sentence = "Learning rate of the hidden matrices only"}, false)
              .add("adam_lr", &Muon::adam_lr,
                   {.sentence = "Learning rate of the other parameters, which AdamW trains; if "
                                "left out, `lr`, or 3e-4 without `lr`"})
              .add("momentum", &Muon::momentum,
                   {.sentence = "Momentum of the moving mean of gradients"})
              .add("nesterov", &Muon::nesterov, {.sentence = "Use Nesterov's form"})
              .add("ns_steps", &Muon::ns_steps, {.sentence = "Number of Newton-Schulz iterations"})
              .weight_decay()
              .pair("betas", &Muon::beta1, &Muon::beta2,
                    {.sentence = "Decay rates of AdamW's moments"})
              .add("eps", &Muon::eps, {.sentence = "AdamW's eps"})
              .ignored<std::string>({"ns_method"},
                                    "Accepted, without effect: iterations are in fp32, on the "
                                    "smaller side of the matrix")
              .ignored<bool>({"adam_w_mode", "torch_adam", "fp32_optimizer_states"})
              .lacking({"per_head_muon"})
              .rows()};
  return section;
}

}  // namespace zero::fields
