// From the dtypes of a Range to the types of elements-inl.h; included once per instruction set by
// the kernels of optimizers.

// Highway's per-target include guard.
#if defined(ZERO_OPTIM_RANGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_OPTIM_RANGE_INL_H_
#undef ZERO_OPTIM_RANGE_INL_H_
#else
#define ZERO_OPTIM_RANGE_INL_H_
#endif

#include <hwy/cache_control.h>

#include "zero/base/streaming.h"
#include "zero/optim/elements-inl.h"
#include "zero/optim/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

/// Calls f(type, type) with those of a range's gradient and weights, from element `begin` on.
template <class F>
void with_types(const Range& range, int64_t begin, const F& f) {
  const auto parameter =
      reinterpret_cast<uintptr_t>(range.parameter) + static_cast<uintptr_t>(begin) * 2;
  // Half of a register is stored: where that is less than the narrowest one, it cannot be streamed.
  const bool streamed =
      HWY_MAX_BYTES >= 32 && range.numel * 2 >= kStreamedBytes && parameter % (2 * kMaxLanes) == 0;
  const auto with_gradient = [&](auto gradient) {
    if (range.lower) return f(gradient, Split());
    if (!range.parameter) return f(gradient, Whole<Absent>());
    const bool bf16 = range.parameter_dtype == c10::ScalarType::BFloat16;
    if (!streamed) return bf16 ? f(gradient, Whole<Bf16>()) : f(gradient, Whole<Fp16>());
    bf16 ? f(gradient, Whole<Streamed<Bf16>>()) : f(gradient, Whole<Streamed<Fp16>>());
    hwy::FlushStream();
  };
  if (range.gradient_dtype == c10::ScalarType::Float) return with_gradient(Fp32());
  if (range.gradient_dtype == c10::ScalarType::BFloat16) return with_gradient(Bf16());
  return with_gradient(Fp16());
}

/// Of the master weights of a range as `Weights` stores them.
template <class Weights>
typename Weights::Stored* master_of(const Range& range) {
  if constexpr (Weights::kReadsParameter) {
    return range.lower;
  } else {
    return range.master;
  }
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
