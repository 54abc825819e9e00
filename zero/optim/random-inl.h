// Random bits for rounding, in vectors. The kernels that round stochastically include this file
// once for each instruction set.

// Highway's per-target include guard.
#if defined(ZERO_OPTIM_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_OPTIM_RANDOM_INL_H_
#undef ZERO_OPTIM_RANDOM_INL_H_
#else
#define ZERO_OPTIM_RANDOM_INL_H_
#endif

#include <hwy/highway.h>

#include "zero/optim/elements-inl.h"
#include "zero/optim/narrow_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

template <class D>
HWY_INLINE hn::Vec<D> mix(D d, hn::Vec<D> x) {
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(d, 0x7feb352dU));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(d, 0x846ca68bU));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

/// Returns random_bits for as many elements as `d` has lanes, from number `index` on.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint32_t, D>> random_vector(D /*d*/, RoundingKey key,
                                                          uint32_t index) {
  const hn::Rebind<uint32_t, D> du;
  const auto first = mix(du, hn::Xor(hn::Iota(du, index), hn::Set(du, key.first)));
  return mix(du, hn::Xor(first, hn::Set(du, key.second)));
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
