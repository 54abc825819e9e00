#include "zero/optim/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/sgd_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/range-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

/// One vector of elements, as torch::optim::SGD; `buffer` is null without momentum.
template <class Gradient, class Weights, class D>
HWY_INLINE void sgd_vector(D d, SgdScalars s, typename Weights::Stored* HWY_RESTRICT master,
                           float* HWY_RESTRICT buffer,
                           const typename Gradient::Stored* HWY_RESTRICT gradient,
                           typename Weights::Parameter* HWY_RESTRICT parameter) {
  auto p = load(Weights(), d, master, parameter);
  auto g = hn::Mul(load(Gradient(), d, gradient), hn::Set(d, s.gradient_scale));
  if (s.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, s.l2), p));
  if (buffer) {
    const auto momentum = hn::Set(d, s.momentum);
    const auto b = s.first ? g
                           : hn::Add(hn::Mul(momentum, hn::LoadU(d, buffer)),
                                     hn::Mul(hn::Set(d, s.one_minus_dampening), g));
    hn::StoreU(b, d, buffer);
    g = s.nesterov ? hn::Add(g, hn::Mul(momentum, b)) : b;
  }
  p = hn::Add(p, hn::Mul(hn::Set(d, s.negative_lr), g));
  store(Weights(), d, p, master, parameter);
}

template <class Gradient, class Weights>
void sgd_range(const SgdScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto s = scalars;
  auto* master = master_of<Weights>(range);
  float* buffer = range.state[0];
  const auto* gradient = static_cast<const typename Gradient::Stored*>(range.gradient);
  auto* parameter = static_cast<typename Weights::Parameter*>(range.parameter);
  const auto buffer_at = [&](int64_t i) { return buffer ? buffer + i : nullptr; };
  const auto parameter_at = [&](int64_t i) { return parameter ? parameter + i : nullptr; };
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    sgd_vector<Gradient, Weights>(d, s, master + i, buffer_at(i), gradient + i, parameter_at(i));
  }
  if (i == end) return;
  const auto count = static_cast<size_t>(end - i);
  Tail<typename Weights::Stored> p(master + i, count);
  Tail<float> b(buffer_at(i), count);
  const Tail<typename Gradient::Stored> g(gradient + i, count);
  const auto* old = Weights::kReadsParameter ? parameter_at(i) : nullptr;
  Tail<typename Weights::Parameter> copy(old, count);
  sgd_vector<Gradient, Weights>(d, s, p.values, buffer ? b.values : nullptr, g.values, copy.values);
  p.write(master + i, count);
  b.write(buffer_at(i), count);
  copy.write(parameter_at(i), count);
}

void sgd(const SgdScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  with_types(range, begin, [&](auto gradient, auto weights) {
    sgd_range<decltype(gradient), decltype(weights)>(scalars, range, begin, end);
  });
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(sgd);
void sgd(const SgdScalars& scalars, const Range& range, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(sgd)(scalars, range, begin, end);
}
}  // namespace zero::optim::kernels
#endif
