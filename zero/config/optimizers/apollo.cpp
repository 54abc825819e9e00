#include <cmath>

#include "zero/config/optimizers/params.h"

namespace zero::fields {

template <>
struct Choices<Apollo::Scaling> {
  static constexpr std::pair<std::string_view, Apollo::Scaling> list[] = {
      {"channel", Apollo::Scaling::channel}, {"tensor", Apollo::Scaling::tensor}};
};

// Keys are apollo-torch's, but for the paper's alpha. transformers names the optimizer
// apollo_adamw.
template <>
const OptimizerSection<Apollo>& optimizer_section() {
  using A = Apollo;
  static const OptimizerSection<Apollo> section{
      .names = {{"Apollo"},
                {"apollo_adamw"},
                {"ApolloMini", Apollo::mini()},
                {"apollo_mini", Apollo::mini()}},
      .rows =
          Params<A>()
              .lr()
              .add("rank", &A::rank,
                   {.sentence = "Numbers that stand for a channel of a matrix and have moments; at "
                                "most the matrix's smaller side is used",
                    .details = "1 in ApolloMini."})
              .add("scale_type", &A::scale_type,
                   {.sentence = "Whether each channel of a matrix has a factor of its own, or the "
                                "whole matrix has one",
                    .details = "\"tensor\" in ApolloMini."})
              .add("alpha", &A::alpha,
                   {.sentence = "Factor of the updates of hidden matrices",
                    .details = "The root of 128 in ApolloMini."})
              .add(
                  "scale", &A::alpha,
                  +[](Apollo& apollo, double scale) { apollo.alpha = std::sqrt(scale); },
                  {.sentence = "The square of alpha, as apollo-torch has it"}, false)
              .add("update_proj_gap", &A::update_proj_gap,
                   {.sentence = "Updates of a parameter after which another projection is drawn"})
              .add("norm_growth", &A::norm_growth,
                   {.sentence = "The norm of a matrix's update is at most this times the last "
                                "one's; at least 1, or 0 for no limit"})
              .add("seed", &A::seed,
                   {.sentence = "Decides the projections, with the parameter's name"})
              .add("adam_lr", &A::adam_lr,
                   {.sentence = "Learning rate of the other parameters, which AdamW trains; if "
                                "left out, `lr`"})
              .betas("Decay rates of the moments, also of AdamW's")
              .add("eps", &A::eps, {.sentence = "Added to the root of the second moment"})
              .weight_decay()
              .rows()};
  return section;
}

}  // namespace zero::fields
