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
              .lr("Learning rate, and the most of a relative step; of `zero train` the peak")
              .add("beta2_decay", &A::beta2_decay,
                   {.sentence = "The share of a new square in step t is t to this power"})
              .add("decay_rate", &A::beta2_decay, &set_as_transformers<&A::beta2_decay, double>,
                   {.sentence = "The same, as transformers names it"}, false)
              .add("d", &A::d,
                   {.sentence = "An update whose root of the mean square is above it is scaled "
                                "down to it"})
              .add("clip_threshold", &A::d, &set_as_transformers<&A::d, double>,
                   {.sentence = "The same, as transformers names it"}, false)
              .weight_decay("Weights are multiplied by 1 - lr weight_decay, as in PyTorch.")
              .add("scale_parameter", &A::scale_parameter,
                   &set_as_transformers<&A::scale_parameter, bool>,
                   {.sentence = "The rate is multiplied by the root of the parameter's mean "
                                "square"})
              .add("relative_step", &A::relative_step,
                   &set_as_transformers<&A::relative_step, bool>,
                   {.sentence = "The rate of step t is at most 1 / sqrt(t)"})
              .add("warmup_init", &A::warmup_init, &set_as_transformers<&A::warmup_init, bool>,
                   {.sentence = "With relative_step, it is at most t / 1000000 too"})
              .add("eps_added", &A::eps_added,
                   {.sentence =
                        "The first eps is added to squares, as in the paper and in transformers",
                    .details = "PyTorch's is a least value. A key of transformers (decay_rate, "
                               "clip_threshold, scale_parameter, relative_step, warmup_init) makes "
                               "it true where it is left out."})
              .pair("eps", &A::eps1, &A::eps2,
                    {.sentence =
                         "The least second moment, and the least root of a parameter's mean square",
                     .details = "null: 2^-23, or 1e-30 with `eps_added`."})
              .add("factored", &A::factored,
                   {.sentence = "Matrices have second moments by rows and columns, not by "
                                "elements"})
              .refused("beta1", "There is no first moment",
                       "There is no first moment here: leave beta1 out, or use AdamW.")
              .ignored<bool>({"foreach"})
              .lacking({"maximize"})
              .rows()};
  return section;
}

}  // namespace zero::fields
