#include "zero/optim/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/adamw_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/range-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

/// One vector of elements. Decoupled weight decay and Adam: 1711.05101, algorithm 2; 1412.6980,
/// algorithm 1.
template <class Gradient, class Weights, class D>
HWY_INLINE void adamw_vector(D d, AdamWScalars s, typename Weights::Stored* HWY_RESTRICT master,
                             float* HWY_RESTRICT exp_avg, float* HWY_RESTRICT exp_avg_sq,
                             const typename Gradient::Stored* HWY_RESTRICT gradient,
                             typename Weights::Parameter* HWY_RESTRICT parameter) {
  auto p = load(Weights(), d, master, parameter);
  auto g = hn::Mul(load(Gradient(), d, gradient), hn::Set(d, s.gradient_scale));
  if (s.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, s.l2), p));
  const auto m = hn::Add(hn::Mul(hn::Set(d, s.beta1), hn::LoadU(d, exp_avg)),
                         hn::Mul(hn::Set(d, s.one_minus_beta1), g));
  const auto v = hn::Add(hn::Mul(hn::Set(d, s.beta2), hn::LoadU(d, exp_avg_sq)),
                         hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g));
  const auto denominator =
      hn::Add(hn::Mul(hn::Sqrt(v), hn::Set(d, s.inverse_root_correction2)), hn::Set(d, s.eps));
  p = hn::Mul(p, hn::Set(d, s.decay));
  p = hn::Add(p, hn::Div(hn::Mul(hn::Set(d, s.negative_step_size), m), denominator));
  hn::StoreU(m, d, exp_avg);
  hn::StoreU(v, d, exp_avg_sq);
  store(Weights(), d, p, master, parameter);
}

template <class Gradient, class Weights>
void adamw_range(const AdamWScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto s = scalars;
  auto* master = master_of<Weights>(range);
  float* exp_avg = range.state[0];
  float* exp_avg_sq = range.state[1];
  const auto* gradient = static_cast<const typename Gradient::Stored*>(range.gradient);
  auto* parameter = static_cast<typename Weights::Parameter*>(range.parameter);
  const auto parameter_at = [&](int64_t i) { return parameter ? parameter + i : nullptr; };
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    for (const float* array : {exp_avg, exp_avg_sq}) prefetch_ahead(array + i);
    prefetch_ahead(master + i);
    prefetch_ahead(gradient + i);
    if (Weights::kReadsParameter) prefetch_ahead(parameter + i);
    adamw_vector<Gradient, Weights>(d, s, master + i, exp_avg + i, exp_avg_sq + i, gradient + i,
                                    parameter_at(i));
  }
  if (i == end) return;
  const auto count = static_cast<size_t>(end - i);
  Tail<typename Weights::Stored> p(master + i, count);
  Tail<float> m(exp_avg + i, count), v(exp_avg_sq + i, count);
  const Tail<typename Gradient::Stored> g(gradient + i, count);
  const auto* old = Weights::kReadsParameter ? parameter_at(i) : nullptr;
  Tail<typename Weights::Parameter> copy(old, count);
  adamw_vector<Gradient, Weights>(d, s, p.values, m.values, v.values, g.values, copy.values);
  p.write(master + i, count);
  m.write(exp_avg + i, count);
  v.write(exp_avg_sq + i, count);
  copy.write(parameter_at(i), count);
}

void adamw(const AdamWScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  with_types(range, begin, [&](auto gradient, auto weights) {
    adamw_range<decltype(gradient), decltype(weights)>(scalars, range, begin, end);
  });
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(adamw);
void adamw(const AdamWScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(adamw)(scalars, range, begin, end);
}
}  // namespace zero::optim::kernels
#endif
