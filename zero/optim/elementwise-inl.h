// A sweep of an element-wise optimizer over Operands of any dtypes. The files of optimizers include
// this file once for each instruction set.

// Highway's per-target include guard.
#if defined(ZERO_OPTIM_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_OPTIM_ELEMENTWISE_INL_H_
#undef ZERO_OPTIM_ELEMENTWISE_INL_H_
#else
#define ZERO_OPTIM_ELEMENTWISE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <limits>

#include "zero/base/streaming.h"
#include "zero/optim/elements-inl.h"
#include "zero/optim/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

/// Stands for the gradients in a sweep without gradients: they read as zeros.
struct NoGradient {
  using Stored = uint8_t;
};
template <class D>
HWY_INLINE hn::Vec<D> load(NoGradient, D d, const uint8_t* /*from*/) {
  return hn::Zero(d);
}

/// Calls f(type, type) with the types of the operands' gradient and weights, for elements from
/// `begin` on.
template <bool kGradients, class F>
void with_types(const Operands& operands, int64_t begin, const F& f) {
  const auto parameter =
      reinterpret_cast<uintptr_t>(operands.parameter) + static_cast<uintptr_t>(begin) * 2;
  // Stores have half of a register. If that is less than the narrowest register, they cannot be
  // streamed.
  const bool streamed = HWY_MAX_BYTES >= 32 && operands.numel * 2 >= kStreamedBytes &&
                        parameter % (2 * kMaxLanes) == 0;
  const auto with_gradient = [&](auto gradient) {
    if (operands.lower) return f(gradient, Split());
    if (!operands.parameter) return f(gradient, Whole<Absent>());
    const bool bf16 = operands.parameter_dtype == c10::ScalarType::BFloat16;
    if (!streamed) return bf16 ? f(gradient, Whole<Bf16>()) : f(gradient, Whole<Fp16>());
    bf16 ? f(gradient, Whole<Streamed<Bf16>>()) : f(gradient, Whole<Streamed<Fp16>>());
    hwy::FlushStream();
  };
  if constexpr (!kGradients) return with_gradient(NoGradient());
  if (operands.gradient_dtype == c10::ScalarType::Float) return with_gradient(Fp32());
  if (operands.gradient_dtype == c10::ScalarType::BFloat16) return with_gradient(Bf16());
  return with_gradient(Fp16());
}

/// Returns the master weights of the operands as `Weights` stores them.
template <class Weights>
typename Weights::Stored* master_of(const Operands& operands) {
  if constexpr (Weights::kReadsParameter) {
    return operands.lower;
  } else {
    return operands.master;
  }
}

/// Scales a gradient and limits it, before anything else.
struct Scale {
  float factor;
  float limit;  ///< Operands::gradient_limit
};
template <class D, class V>
HWY_INLINE V scaled(D d, V gradient, Scale scale) {
  const auto g = hn::Mul(gradient, hn::Set(d, scale.factor));
  if (scale.limit == std::numeric_limits<float>::infinity()) return g;
  const auto limit = hn::Set(d, scale.limit);
  const auto least = hn::Neg(limit);
  return hn::IfThenElse(hn::Gt(g, limit), limit, hn::IfThenElse(hn::Lt(g, least), least, g));
}

/// Updates one vector of elements. The numbers are a copy on the caller's stack, which no store can
/// change.
template <class Rule, int kUsed, class Gradient, class Weights, class Numbers, class D>
HWY_INLINE void update_vector(D d, const Numbers& numbers, Scale scale,
                              typename Weights::Stored* HWY_RESTRICT master,
                              float* HWY_RESTRICT first, float* HWY_RESTRICT second,
                              const typename Gradient::Stored* HWY_RESTRICT gradient,
                              typename Weights::Parameter* HWY_RESTRICT parameter) {
  auto p = load(Weights(), d, master, parameter);
  const auto g = scaled(d, load(Gradient(), d, gradient), scale);
  auto m = hn::Zero(d);
  auto v = hn::Zero(d);
  if constexpr (kUsed > 0) m = hn::LoadU(d, first);
  if constexpr (kUsed > 1) v = hn::LoadU(d, second);
  Rule::apply(d, numbers, p, g, m, v);
  if constexpr (kUsed > 0) hn::StoreU(m, d, first);
  if constexpr (kUsed > 1) hn::StoreU(v, d, second);
  store(Weights(), d, p, master, parameter);
}

template <class Rule, int kUsed, class Gradient, class Weights, class Numbers>
void update_operands(const Numbers& given, float gradient_scale, const Operands& operands,
                     int64_t begin, int64_t end) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto numbers = given;
  const Scale scale{gradient_scale, operands.gradient_limit};
  auto* master = master_of<Weights>(operands);
  const auto* gradient = static_cast<const typename Gradient::Stored*>(operands.gradient);
  auto* parameter = static_cast<typename Weights::Parameter*>(operands.parameter);
  const auto gradient_at = [&](int64_t i) { return gradient ? gradient + i : nullptr; };
  const auto state_at = [&](int index, int64_t i) {
    return index < kUsed ? operands.state[static_cast<size_t>(index)] + i : nullptr;
  };
  const auto parameter_at = [&](int64_t i) { return parameter ? parameter + i : nullptr; };
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    for (int s = 0; s < kUsed; ++s) prefetch_ahead(state_at(s, i));
    prefetch_ahead(master + i);
    prefetch_ahead(gradient_at(i));
    if (Weights::kReadsParameter) prefetch_ahead(parameter + i);
    update_vector<Rule, kUsed, Gradient, Weights>(d, numbers, scale, master + i, state_at(0, i),
                                                  state_at(1, i), gradient_at(i), parameter_at(i));
  }
  if (i == end) return;
  const auto count = static_cast<size_t>(end - i);
  Tail<typename Weights::Stored> p(master + i, count);
  Tail<float> m(state_at(0, i), count);
  Tail<float> v(state_at(1, i), count);
  const Tail<typename Gradient::Stored> g(gradient_at(i), count);
  const auto* old = Weights::kReadsParameter ? parameter_at(i) : nullptr;
  Tail<typename Weights::Parameter> copy(old, count);
  update_vector<Rule, kUsed, Gradient, Weights>(d, numbers, scale, p.values, m.values, v.values,
                                                g.values, copy.values);
  p.write(master + i, count);
  m.write(state_at(0, i), count);
  v.write(state_at(1, i), count);
  copy.write(parameter_at(i), count);
}

/// Applies `Rule` to elements [begin, end), which have the first kUsed states. `Rule::apply(d,
/// numbers, p, g, first, second)` takes vectors of weights, scaled gradients and states, and
/// changes all but g. States beyond kUsed are zeros, and their new values are lost.
template <class Rule, int kUsed, bool kGradients = true, class Numbers>
void update_elements(const Numbers& numbers, float gradient_scale, const Operands& operands,
                     int64_t begin, int64_t end) {
  with_types<kGradients>(operands, begin, [&](auto gradient, auto weights) {
    update_operands<Rule, kUsed, decltype(gradient), decltype(weights)>(numbers, gradient_scale,
                                                                        operands, begin, end);
  });
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
