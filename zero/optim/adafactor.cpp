// Adafactor (N. Shazeer and M. Stern, 1804.04235), as torch::optim::Adafactor and, with
// `eps_added`, as in transformers. It takes two sweeps: Note [Two sweeps] in sweeps.h. If the
// second moment is factored, factors.cpp does the work between them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "zero/optim/algorithm.h"
#include "zero/optim/factors.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/adafactor.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/norms-inl.h"

#ifndef ZERO_OPTIM_ADAFACTOR_STEP_
#define ZERO_OPTIM_ADAFACTOR_STEP_
namespace zero::optim {

/// Makes the first sweep over elements that have second moments of their own.
template <class Number>
struct AdafactorDirection {
  Number old, fresh;  ///< shares of the old moment, and of the new square
  Number added;       ///< is added to a square
  Number least;       ///< lower limit of the moment in the division

  AdafactorDirection(const Adafactor& o, Moment moment) {
    const double share = std::pow(static_cast<double>(moment.step), o.beta2_decay);
    const double eps = o.first_eps();
    old = static_cast<Number>(1 - share);
    fresh = static_cast<Number>(share);
    added = static_cast<Number>(o.eps_added ? eps : 0);
    // A smaller moment may be 0 in fp32, and nothing should be divided by 0.
    constexpr auto kNormal = static_cast<double>(std::numeric_limits<float>::min());
    least = static_cast<Number>(o.eps_added ? 0 : std::max(kNormal, eps * eps));
  }

  Number apply(Number g, Number& moment) const {
    moment = old * moment + fresh * (g * g + added);
    return g / std::sqrt(least > moment ? least : moment);
  }
};

/// Makes the second sweep, in which the gradient is the direction.
template <class Number>
struct AdafactorStep {
  Number decay;        ///< factor of the weights, 1 - lr * weight_decay
  Number coefficient;  ///< factor of the direction: -rate * ratio

  AdafactorStep(const Adafactor& o, Moment moment)
      : decay(static_cast<Number>(1 - moment.lr * o.weight_decay)),
        coefficient(static_cast<Number>(-rate(o, moment) * moment.ratio)) {}

  static double rate(const Adafactor& o, Moment moment) {
    if (!o.relative_step) return moment.lr;
    const auto step = static_cast<double>(moment.step);
    const double most = o.warmup_init ? std::min(moment.lr, 1e-6 * step) : moment.lr;
    return std::min(most, 1 / std::sqrt(step));
  }

  void apply(Number& p, Number g, std::array<Number, kMostStates>& /*state*/) const {
    p *= decay;
    p += coefficient * g;
  }
};

}  // namespace zero::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

struct AdafactorFirst {
  static constexpr bool kNormOfUpdate = true;
  template <class D, class V>
  static HWY_INLINE V apply(D d, const AdafactorDirection<float>& s, V /*p*/, V g, V& moment,
                            V& /*none*/) {
    const auto square = hn::Add(hn::Mul(g, g), hn::Set(d, s.added));
    moment = hn::Add(hn::Mul(hn::Set(d, s.old), moment), hn::Mul(hn::Set(d, s.fresh), square));
    const auto least = hn::Set(d, s.least);
    return hn::Div(g, hn::Sqrt(hn::IfThenElse(hn::Gt(least, moment), least, moment)));
  }
};

/// Keeps the gradient as the direction, since the moments belong to rows and columns.
struct AdafactorGradient {
  static constexpr bool kNormOfUpdate = false;
  template <class D, class V>
  static HWY_INLINE V apply(D /*d*/, const AdafactorDirection<float>& /*s*/, V /*p*/, V g,
                            V& /*none*/, V& /*none*/) {
    return g;
  }
};

struct AdafactorRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const AdafactorStep<float>& s, V& p, V g, V& /*none*/,
                               V& /*none*/) {
    p = hn::Mul(p, hn::Set(d, s.decay));
    p = hn::Add(p, hn::Mul(hn::Set(d, s.coefficient), g));
  }
};

void adafactor_first(const AdafactorDirection<float>& step, float gradient_scale,
                     const Operands& operands, Findings& findings, int64_t begin, int64_t end) {
  first_elements<AdafactorFirst, 1>(step, gradient_scale, operands, findings, begin, end);
}

void adafactor_gradient(const AdafactorDirection<float>& step, float gradient_scale,
                        const Operands& operands, Findings& findings, int64_t begin, int64_t end) {
  first_elements<AdafactorGradient, 0>(step, gradient_scale, operands, findings, begin, end);
}

void adafactor_second(const AdafactorStep<float>& step, const Operands& operands, int64_t begin,
                      int64_t end) {
  update_elements<AdafactorRule, 0>(step, 1.0F, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim {

namespace kernels {
HWY_EXPORT(adafactor_first);
HWY_EXPORT(adafactor_gradient);
HWY_EXPORT(adafactor_second);
}  // namespace kernels

namespace {

void first(const Adafactor& optimizer, Moment moment, float gradient_scale,
           const Operands& operands, Findings& findings, int64_t begin, int64_t end) {
  using namespace kernels;
  const AdafactorDirection<float> step(optimizer, moment);
  if (optimizer.factored) {
    HWY_DYNAMIC_DISPATCH(adafactor_gradient)(step, gradient_scale, operands, findings, begin, end);
  } else {
    HWY_DYNAMIC_DISPATCH(adafactor_first)(step, gradient_scale, operands, findings, begin, end);
  }
}

void first_reference(const Adafactor& optimizer, Moment moment, float gradient_scale,
                     const Operands& operands, Findings& findings) {
  const AdafactorDirection<float> step(optimizer, moment);
  for (int64_t begin = 0; begin < operands.numel; begin += ExactSum::kBlock) {
    std::array<float, ExactSum::kBlock> weights{};
    std::array<float, ExactSum::kBlock> direction{};
    for (int64_t i = begin; i < std::min(operands.numel, begin + ExactSum::kBlock); ++i) {
      const auto at = static_cast<size_t>(i - begin);
      const float g = gradient_at(operands, i, gradient_scale);
      weights[at] = weight_at(operands, i);
      direction[at] = optimizer.factored ? g : step.apply(g, operands.state[0][i]);
      if (findings.direction) findings.direction[i] = direction[at];
    }
    findings.norms.weights.add(sum_of_squares(weights));
    if (!optimizer.factored) findings.norms.update.add(sum_of_squares(direction));
  }
}

double ratio_of(const Adafactor& o, double weights, double update) {
  const double scale = o.scale_parameter ? std::max(o.eps2, weights) : 1;
  return scale / std::max(1.0, update / o.d);
}

double mean_root(const ExactSum& squares, int64_t numel) {
  return std::sqrt(squares.value() / static_cast<double>(numel));
}

// Updates elements that have moments of their own.
void exact(const Adafactor& optimizer, Moment moment, const ExactOperands& operands) {
  const AdafactorDirection<double> first(optimizer, moment);
  std::vector<double> direction(static_cast<size_t>(operands.numel));
  double weights = 0;
  double update = 0;
  for (int64_t i = 0; i < operands.numel; ++i) {
    auto& u = direction[static_cast<size_t>(i)];
    u = first.apply(operands.gradient[i], operands.state[0][i]);
    weights += operands.weights[i] * operands.weights[i];
    update += u * u;
  }
  const auto numel = static_cast<double>(operands.numel);
  moment.ratio = ratio_of(optimizer, std::sqrt(weights / numel), std::sqrt(update / numel));
  exact_update<AdafactorStep>(
      optimizer, moment,
      {.numel = operands.numel, .weights = operands.weights, .gradient = direction.data()});
}

std::vector<FactoredState> rows_and_columns(const Adafactor& optimizer, c10::IntArrayRef sizes,
                                            c10::IntArrayRef strides) {
  if (!optimizer.factored) return {};
  const Factors factors(sizes, strides);
  return {{"row_var", factors.row_shape()}, {"col_var", factors.column_shape()}};
}

}  // namespace

}  // namespace optim

const optim::Algorithm<Adafactor>& Adafactor::algorithm() {
  static const optim::Algorithm<Adafactor> known{
      .name = "Adafactor",
      .limits = {{"lr", &Adafactor::lr, 0},
                 {"beta2_decay", &Adafactor::beta2_decay, {}, 0},
                 {"d", &Adafactor::d, 1e-30},
                 {"weight_decay", &Adafactor::weight_decay, 0},
                 {"eps[0]", &Adafactor::eps1, 0},
                 {"eps[1]", &Adafactor::eps2, 0}},
      .state_names =
          [](const Adafactor& o) {
            return o.factored ? std::vector<std::string_view>{}
                              : std::vector<std::string_view>{"variance"};
          },
      .check =
          [](const Adafactor& o) {
            if (o.first_eps() <= 0) optim::refuse("eps[0]", o.first_eps(), "above 0, or null");
            if (o.warmup_init && !o.relative_step)
              optim::refuse("warmup_init", 1, "false where relative_step is false");
          },
      .reach = optim::Reach::parameter,
      .is_factored = [](const Adafactor& o) { return o.factored; },
      .factored_states = &optim::rows_and_columns,
      .keeps_direction = true,
      .first_sweep = &optim::first,
      .first_sweep_reference = &optim::first_reference,
      .ratio =
          [](const Adafactor& optimizer, const optim::ParameterNorms& norms, int64_t numel) {
            return optim::ratio_of(optimizer, optim::mean_root(norms.weights, numel),
                                   optim::mean_root(norms.update, numel));
          },
      .update =
          [](const Adafactor& optimizer, optim::Moment moment, float /*gradient_scale*/,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(adafactor_second)
            (optim::AdafactorStep<float>(optimizer, moment), operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::AdafactorStep, Adafactor>,
      .update_exact = &optim::exact};
  return known;
}

}  // namespace zero
#endif
