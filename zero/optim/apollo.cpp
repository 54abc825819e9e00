// APOLLO (H. Zhu, Z. Zhang and others, 2412.05270). It takes two sweeps: Note [Two sweeps] in
// sweeps.h. projection.cpp does the work between them.
#include "zero/optim/algorithm.h"
#include "zero/optim/matrix_step.h"
#include "zero/optim/projection.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/apollo.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elementwise-inl.h"

#ifndef ZERO_OPTIM_APOLLO_DIRECTION_
#define ZERO_OPTIM_APOLLO_DIRECTION_
namespace zero::optim {

/// Makes the first sweep. The weights are here the array that takes the scaled gradient.
template <class Number>
struct ApolloDirection {
  ApolloDirection(const Apollo& /*optimizer*/, Moment /*moment*/) {}
  void apply(Number& direction, Number g, std::array<Number, kMostStates>& /*state*/) const {
    direction = g;
  }
};

}  // namespace zero::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct ApolloDirectionRule {
  template <class D, class V>
  static HWY_INLINE void apply(D /*d*/, const ApolloDirection<float>& /*step*/, V& direction, V g,
                               V& /*none*/, V& /*none*/) {
    direction = g;
  }
};

void apollo_first(const ApolloDirection<float>& step, float gradient_scale,
                  const Operands& operands, int64_t begin, int64_t end) {
  update_elements<ApolloDirectionRule, 0>(step, gradient_scale, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim {

namespace kernels {
HWY_EXPORT(apollo_first);
}

namespace {

std::vector<FactoredState> low_rank_states(const Apollo& optimizer, c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides) {
  const auto projection = projection_of(optimizer, sizes, strides);
  if (!projection) return {};
  const std::vector<int64_t> moments{projection->channels, projection->rank};
  return {{"exp_avg_low_rank", moments}, {"exp_avg_sq_low_rank", moments}, {"update_norm", {1}}};
}

}  // namespace

}  // namespace optim

const optim::Algorithm<Apollo>& Apollo::algorithm() {
  static const optim::Algorithm<Apollo> known{
      .name = "Apollo",
      .limits = {{"lr", &Apollo::lr, 0},
                 {"adam_lr", &Apollo::adam_lr, 0},
                 {"rank", &Apollo::rank, 1},
                 {"alpha", &Apollo::alpha, 0},
                 {"update_proj_gap", &Apollo::update_proj_gap, 1},
                 {"norm_growth", &Apollo::norm_growth, 0},
                 {"seed", &Apollo::seed, 0},
                 {"weight_decay", &Apollo::weight_decay, 0},
                 {"beta1", &Apollo::beta1, 0, {}, 1},
                 {"beta2", &Apollo::beta2, 0, {}, 1},
                 {"eps", &Apollo::eps, 0}},
      .state_names = [](const Apollo&) { return std::vector<std::string_view>{}; },
      .check =
          [](const Apollo& o) {
            if (o.norm_growth > 0 && o.norm_growth < 1)
              optim::refuse("norm_growth", o.norm_growth, "at least 1, or 0 for no limit");
          },
      .reach = optim::Reach::matrix,
      .factored_states = &optim::low_rank_states,
      .beside_matrices = &optim::adamw_beside<Apollo>,
      .first_sweep =
          [](const Apollo& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, optim::Findings& findings, int64_t begin,
             int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(apollo_first)
            (optim::ApolloDirection<float>(optimizer, moment), gradient_scale,
             optim::to_direction(operands, findings.direction), begin, end);
          },
      .first_sweep_reference = &optim::plain_direction<optim::ApolloDirection, Apollo>,
      .update = &optim::second_sweep<Apollo>,
      .update_reference = &optim::plain_update<optim::MatrixStep, Apollo>,
      .update_exact = &optim::exact_update<optim::MatrixStep, Apollo>};
  return known;
}

}  // namespace zero
#endif
