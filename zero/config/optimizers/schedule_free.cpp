#include "zero/config/optimizers/params.h"

namespace zero::fields {

// The first name is ours; the others are those of schedulefree and of transformers.
template <>
const OptimizerSection<ScheduleFreeAdamW>& optimizer_section() {
  static const OptimizerSection<ScheduleFreeAdamW> section{
      .names = {{"ScheduleFreeAdamW"}, {"AdamWScheduleFree"}, {"schedule_free_adamw"}},
      .rows =
          Params<ScheduleFreeAdamW>()
              .lr("Learning rate, which no schedule lowers")
              .betas("Share of the mean of all iterates in the weights that are trained, above 0, "
                     "and decay rate of the second moment")
              .add("eps", &ScheduleFreeAdamW::eps,
                   {.sentence = "Added to the root of the second moment"})
              .weight_decay("It acts on the weights that are trained.")
              .add(
                  "warmup_steps", &ScheduleFreeAdamW::warmup_steps,
                  {.sentence = "Updates in which the rate rises linearly to `lr`",
                   .details =
                       "The squares of the rates are the weights of the iterates in their "
                       "mean. If left out it is 0, and `train.warmup` in `zero train`, which comes "
                       "first where it is given."})
              .only("r", 0, "Must be 0: the iterates' weights do not grow with the step",
                    "libzero has the weights of the paper alone")
              .only("weight_lr_power", 2, "Must be 2: an iterate's weight is its rate squared",
                    "libzero has the weights of the paper alone")
              .ignored<bool>({"foreach"})
              .clipped_by_engine()
              .rows()};
  return section;
}

}  // namespace zero::fields
