#include "zero/config/optimizers/params.h"

namespace zero::fields {

namespace {

/// Sets a value by a key of transformers, whose Adafactor adds eps to squares.
template <auto member, class Value>
void set_as_transformers(Adafactor& adafactor, Value value) {
  adafactor.*member = value;
  adafactor.eps_added = true;
}

}  // namespace

template <>
const OptimizerSection<Adafactor>& optimizer_section() {
  using A = Adafactor;
  static const OptimizerSection<A> section{
      .names = {{"Adafactor"}},
      .rows =
          Params<A>()
              .lr("Learning rate, and the upper limit of a relative step; in `zero train` the peak "
                  "of the schedule")
              .add("beta2_decay", &A::beta2_decay,
                   {.sentence = "Exponent of the decay: in step t a new square has the share t to "
                                "this power"})
              .add("decay_rate", &A::beta2_decay, &set_as_transformers<&A::beta2_decay, double>,
                   {.sentence = "The same key, by its name in transformers"}, false)
              .add("d", &A::d,
                   {.sentence = "Largest root mean square of an update; a larger update is scaled "
                                "down to it"})
              .add("clip_threshold", &A::d, &set_as_transformers<&A::d, double>,
                   {.sentence = "The same key, by its name in transformers"}, false)
              .weight_decay("A step multiplies weights by 1 - lr weight_decay, as in PyTorch.")
              .add("scale_parameter", &A::scale_parameter,
                   &set_as_transformers<&A::scale_parameter, bool>,
                   {.sentence = "Multiply the rate by the root mean square of the parameter"})
              .add("relative_step", &A::relative_step,
                   &set_as_transformers<&A::relative_step, bool>,
                   {.sentence = "Limit the rate of step t to 1 / sqrt(t)"})
              .add("warmup_init", &A::warmup_init, &set_as_transformers<&A::warmup_init, bool>,
                   {.sentence = "With relative_step, also limit the rate of step t to t / 1000000"})
              .add("eps_added", &A::eps_added,
                   {.sentence =
                        "Add the first eps to the squares, as in the paper and in transformers",
                    .details = "In PyTorch the first eps is a lower limit. If this key is left "
                               "out, a key of transformers (decay_rate, clip_threshold, "
                               "scale_parameter, relative_step, warmup_init) makes it true."})
              .pair("eps", &A::eps1, &A::eps2,
                    {.sentence = "Lower limits of the second moment, and of the root mean square "
                                 "of a parameter",
                     .details = "null means 2^-23, or 1e-30 with `eps_added`."})
              .add("factored", &A::factored,
                   {.sentence = "Keep second moments of matrices by rows and columns, instead of "
                                "by elements"})
              .refused("beta1", "Refused, because there is no first moment",
                       "There is no first moment here: leave beta1 out, or use AdamW.")
              .ignored<bool>({"foreach"})
              .lacking({"maximize"})
              .rows()};
  return section;
}

}  // namespace zero::fields
