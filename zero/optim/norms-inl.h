// The first sweep of an optimizer whose step depends on norms of its whole parameter, over Operands
// of any dtypes. The files of optimizers include this file once for each instruction set.

// Highway's per-target include guard.
#if defined(ZERO_OPTIM_NORMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_OPTIM_NORMS_INL_H_
#undef ZERO_OPTIM_NORMS_INL_H_
#else
#define ZERO_OPTIM_NORMS_INL_H_
#endif

#include <algorithm>

#include "zero/optim/elementwise-inl.h"
#include "zero/optim/sweeps.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

/// Returns the sum of a block's squares in fp64, where each square is exact. Element i is added to
/// partial sum i % 8 in order of i; then the partial sums are added as a tree.
HWY_INLINE double sum_of_squares(const float* HWY_RESTRICT values) {
  constexpr size_t kPartial = 8;
  const hn::CappedTag<double, kPartial> d;
  const hn::Rebind<float, decltype(d)> d32;
  HWY_ALIGN double s[kPartial];
  for (size_t j = 0; j < kPartial; j += hn::Lanes(d)) {
    auto sum = hn::Zero(d);
    for (size_t i = j; i < static_cast<size_t>(ExactSum::kBlock); i += kPartial) {
      const auto value = hn::PromoteTo(d, hn::LoadU(d32, values + i));
      sum = hn::MulAdd(value, value, sum);
    }
    hn::Store(sum, d, s + j);
  }
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

template <class Rule, int kUsed, class Gradient, class Weights, class Numbers>
void first_operands(const Numbers& given, float gradient_scale, const Operands& operands,
                    Findings& findings, int64_t begin, int64_t end) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto numbers = given;
  const Scale scale{gradient_scale, operands.gradient_limit};
  const auto* master = master_of<Weights>(operands);
  const auto* gradient = static_cast<const typename Gradient::Stored*>(operands.gradient);
  const auto* parameter = static_cast<const typename Weights::Parameter*>(operands.parameter);
  float* const first = operands.state[0];
  float* const second = operands.state[1];
  const auto state_at = [&](int index, int64_t i) {
    return index < kUsed ? (index == 0 ? first : second) + i : nullptr;
  };
  float* const to = findings.direction;
  HWY_ALIGN float weights[ExactSum::kBlock];
  HWY_ALIGN float direction[ExactSum::kBlock];
  const auto vector = [&](const typename Weights::Stored* p_at, float* m_at, float* v_at,
                          const typename Gradient::Stored* g_at,
                          const typename Weights::Parameter* upper_at, float* p_to, float* u_to)
                          HWY_ATTR {
                            const auto p = load(Weights(), d, p_at, upper_at);
                            const auto g = scaled(d, load(Gradient(), d, g_at), scale);
                            auto m = hn::Zero(d);
                            auto v = hn::Zero(d);
                            if constexpr (kUsed > 0) m = hn::LoadU(d, m_at);
                            if constexpr (kUsed > 1) v = hn::LoadU(d, v_at);
                            hn::StoreU(Rule::apply(d, numbers, p, g, m, v), d, u_to);
                            if constexpr (kUsed > 0) hn::StoreU(m, d, m_at);
                            if constexpr (kUsed > 1) hn::StoreU(v, d, v_at);
                            hn::StoreU(p, d, p_to);
                          };
  const auto upper = [&](int64_t i) { return parameter ? parameter + i : nullptr; };
  for (int64_t i = begin; i < end; i += ExactSum::kBlock) {
    const int64_t stop = std::min(end, i + ExactSum::kBlock);
    int64_t j = i;
    for (; j + lanes <= stop; j += lanes) {
      for (int s = 0; s < kUsed; ++s) prefetch_ahead(state_at(s, j));
      prefetch_ahead(master + j);
      prefetch_ahead(gradient + j);
      vector(master + j, state_at(0, j), state_at(1, j), gradient + j, upper(j), weights + (j - i),
             direction + (j - i));
    }
    if (j < stop) {
      const auto count = static_cast<size_t>(stop - j);
      const Tail<typename Weights::Stored> p(master + j, count);
      Tail<float> m(state_at(0, j), count);
      Tail<float> v(state_at(1, j), count);
      const Tail<typename Gradient::Stored> g(gradient + j, count);
      const Tail<typename Weights::Parameter> old(Weights::kReadsParameter ? upper(j) : nullptr,
                                                  count);
      Tail<float> to_weights(nullptr, 0);
      Tail<float> to_direction(nullptr, 0);
      vector(p.values, m.values, v.values, g.values, old.values, to_weights.values,
             to_direction.values);
      m.write(state_at(0, j), count);
      v.write(state_at(1, j), count);
      to_weights.write(weights + (j - i), count);
      to_direction.write(direction + (j - i), count);
    }
    if (to != nullptr) std::copy_n(direction, static_cast<size_t>(stop - i), to + i);
    for (int64_t k = stop - i; k < ExactSum::kBlock; ++k) weights[k] = direction[k] = 0;
    findings.norms.weights.add(sum_of_squares(weights));
    if constexpr (Rule::kNormOfUpdate) findings.norms.update.add(sum_of_squares(direction));
  }
}

/// Makes the first sweep over elements [begin, end) with the first kUsed states. `Rule::apply(d,
/// numbers, p, g, first, second)` changes the states and returns the direction. With
/// `Rule::kNormOfUpdate` the norm of the direction is taken. The direction is kept if `findings`
/// has a place for it.
template <class Rule, int kUsed, class Numbers>
void first_elements(const Numbers& numbers, float gradient_scale, const Operands& operands,
                    Findings& findings, int64_t begin, int64_t end) {
  with_types<true>(operands, begin, [&](auto gradient, auto weights) {
    first_operands<Rule, kUsed, decltype(gradient), decltype(weights)>(
        numbers, gradient_scale, operands, findings, begin, end);
  });
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
