// LAMB: 1904.00962, algorithm 2, as in DeepSpeed's FusedLamb. It takes two sweeps: Note [Two
// sweeps] in sweeps.h.
#include <algorithm>
#include <cmath>

#include "zero/optim/algorithm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/lamb.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/norms-inl.h"

#ifndef ZERO_OPTIM_LAMB_STEP_
#define ZERO_OPTIM_LAMB_STEP_
namespace zero::optim {

template <class Number>
struct LambStep {
  Number beta1, one_minus_beta1;
  Number beta2, one_minus_beta2;
  Number eps, eps_inside;  ///< one of them is 0
  Number decay;
  Number coefficient;  ///< factor of the direction: -rate * ratio

  LambStep(const Lamb& o, Moment moment) {
    const auto correction = [&](double beta) {
      return o.bias_correction ? 1 - std::pow(beta, static_cast<double>(moment.step)) : 1;
    };
    beta1 = static_cast<Number>(o.beta1);
    one_minus_beta1 = static_cast<Number>(1 - o.beta1);
    beta2 = static_cast<Number>(o.beta2);
    one_minus_beta2 = static_cast<Number>(1 - o.beta2);
    eps = static_cast<Number>(o.eps_inside_sqrt ? 0 : o.eps);
    eps_inside = static_cast<Number>(o.eps_inside_sqrt ? o.eps : 0);
    decay = static_cast<Number>(o.weight_decay);
    const double rate = moment.lr * std::sqrt(correction(o.beta2)) / correction(o.beta1);
    coefficient = static_cast<Number>(-rate * moment.ratio);
  }

  void average(Number g, std::array<Number, kMostStates>& state) const {
    auto& [m, v] = state;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * g * g;
  }
  Number direction(Number p, const std::array<Number, kMostStates>& state) const {
    const auto& [m, v] = state;
    return m / (std::sqrt(v + eps_inside) + eps) + decay * p;
  }
  /// Makes the second sweep.
  void apply(Number& p, Number /*g*/, std::array<Number, kMostStates>& state) const {
    p += coefficient * direction(p, state);
  }
};

}  // namespace zero::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

template <class D, class V>
HWY_INLINE V lamb_direction(D d, const LambStep<float>& s, V p, V m, V v) {
  const auto root = hn::Sqrt(hn::Add(v, hn::Set(d, s.eps_inside)));
  return hn::Add(hn::Div(m, hn::Add(root, hn::Set(d, s.eps))), hn::Mul(hn::Set(d, s.decay), p));
}

/// Makes the first sweep: it updates the moments, and returns the direction. Weights stay.
struct LambFirst {
  static constexpr bool kNormOfUpdate = true;
  template <class D, class V>
  static HWY_INLINE V apply(D d, const LambStep<float>& s, V p, V g, V& m, V& v) {
    m = hn::Add(hn::Mul(hn::Set(d, s.beta1), m), hn::Mul(hn::Set(d, s.one_minus_beta1), g));
    v = hn::Add(hn::Mul(hn::Set(d, s.beta2), v),
                hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g));
    return lamb_direction(d, s, p, m, v);
  }
};

struct LambRule {
  template <class D, class V>
  static HWY_INLINE void apply(D d, const LambStep<float>& s, V& p, V /*g*/, V& m, V& v) {
    p = hn::Add(p, hn::Mul(hn::Set(d, s.coefficient), lamb_direction(d, s, p, m, v)));
  }
};

void lamb_first(const LambStep<float>& step, float gradient_scale, const Operands& operands,
                Findings& findings, int64_t begin, int64_t end) {
  first_elements<LambFirst, 2>(step, gradient_scale, operands, findings, begin, end);
}

void lamb_second(const LambStep<float>& step, const Operands& operands, int64_t begin,
                 int64_t end) {
  update_elements<LambRule, 2, false>(step, 1.0F, operands, begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

namespace optim {

namespace kernels {
HWY_EXPORT(lamb_first);
HWY_EXPORT(lamb_second);
}  // namespace kernels

namespace {

void first_reference(const Lamb& optimizer, Moment moment, float gradient_scale,
                     const Operands& operands, Findings& findings) {
  const LambStep<float> step(optimizer, moment);
  for (int64_t begin = 0; begin < operands.numel; begin += ExactSum::kBlock) {
    std::array<float, ExactSum::kBlock> weights{};
    std::array<float, ExactSum::kBlock> direction{};
    for (int64_t i = begin; i < std::min(operands.numel, begin + ExactSum::kBlock); ++i) {
      const float p = weight_at(operands, i);
      std::array<float, kMostStates> state{operands.state[0][i], operands.state[1][i]};
      step.average(gradient_at(operands, i, gradient_scale), state);
      operands.state[0][i] = state[0];
      operands.state[1][i] = state[1];
      weights[static_cast<size_t>(i - begin)] = p;
      direction[static_cast<size_t>(i - begin)] = step.direction(p, state);
    }
    findings.norms.weights.add(sum_of_squares(weights));
    findings.norms.update.add(sum_of_squares(direction));
  }
}

double bounded_ratio(const Lamb& o, double weights, double update) {
  if (weights == 0 || update == 0) return 1;
  return std::clamp(weights / update, o.min_coeff, o.max_coeff);
}

void exact(const Lamb& optimizer, Moment moment, const ExactOperands& operands) {
  const LambStep<double> first(optimizer, moment);
  double weights = 0;
  double update = 0;
  for (int64_t i = 0; i < operands.numel; ++i) {
    std::array<double, kMostStates> state{operands.state[0][i], operands.state[1][i]};
    first.average(operands.gradient[i], state);
    operands.state[0][i] = state[0];
    operands.state[1][i] = state[1];
    weights += operands.weights[i] * operands.weights[i];
    update += std::pow(first.direction(operands.weights[i], state), 2);
  }
  moment.ratio = bounded_ratio(optimizer, std::sqrt(weights), std::sqrt(update));
  exact_update<LambStep>(optimizer, moment, operands);
}

}  // namespace

}  // namespace optim

const optim::Algorithm<Lamb>& Lamb::algorithm() {
  static const optim::Algorithm<Lamb> known{
      .name = "Lamb",
      .limits = {{"lr", &Lamb::lr, 0},
                 {"beta1", &Lamb::beta1, 0, {}, 1},
                 {"beta2", &Lamb::beta2, 0, {}, 1},
                 {"eps", &Lamb::eps, 0},
                 {"weight_decay", &Lamb::weight_decay, 0},
                 {"min_coeff", &Lamb::min_coeff, 0},
                 {"max_coeff", &Lamb::max_coeff, 0}},
      .state_names =
          [](const Lamb&) {
            return std::vector<std::string_view>{"exp_avg", "exp_avg_sq"};
          },
      .check =
          [](const Lamb& o) {
            if (o.min_coeff > o.max_coeff)
              optim::refuse("min_coeff", o.min_coeff, "at most max_coeff");
          },
      .reach = optim::Reach::parameter,
      .first_sweep =
          [](const Lamb& optimizer, optim::Moment moment, float gradient_scale,
             const optim::Operands& operands, optim::Findings& findings, int64_t begin,
             int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(lamb_first)
            (optim::LambStep<float>(optimizer, moment), gradient_scale, operands, findings, begin,
             end);
          },
      .first_sweep_reference = &optim::first_reference,
      .ratio =
          [](const Lamb& optimizer, const optim::ParameterNorms& norms, int64_t /*numel*/) {
            return optim::bounded_ratio(optimizer, std::sqrt(norms.weights.value()),
                                        std::sqrt(norms.update.value()));
          },
      .update =
          [](const Lamb& optimizer, optim::Moment moment, float /*gradient_scale*/,
             const optim::Operands& operands, int64_t begin, int64_t end) {
            using namespace optim::kernels;
            HWY_DYNAMIC_DISPATCH(lamb_second)
            (optim::LambStep<float>(optimizer, moment), operands, begin, end);
          },
      .update_reference = &optim::plain_update<optim::LambStep, Lamb>,
      .update_exact = &optim::exact};
  return known;
}

}  // namespace zero
#endif
