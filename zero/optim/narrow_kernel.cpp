#include "zero/optim/narrow_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/narrow_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elements-inl.h"
#include "zero/optim/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

void widen(const uint16_t* HWY_RESTRICT from, float* HWY_RESTRICT to, int64_t numel) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) hn::StoreU(load(Bf16(), d, from + i), d, to + i);
  if (i == numel) return;
  const auto count = static_cast<size_t>(numel - i);
  const Tail<uint16_t> tail(from + i, count);
  Tail<float> wide(nullptr, 0);
  for (size_t j = 0; j < kMaxLanes; j += static_cast<size_t>(lanes))
    hn::StoreU(load(Bf16(), d, tail.values + j), d, wide.values + j);
  wide.write(to + i, count);
}

/// Adds a random number of 16 bits to the lower 16 bits; a carry into the upper ones rounds up.
/// Infinity gets no carry, and NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> round_vector([[maybe_unused]] D d, hn::Vec<D> value,
                                                         RoundingKey key, uint32_t index) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto random = hn::ShiftRight<16>(random_vector(d, key, index));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::BitCast(du, value), random));
  const auto number = hn::RebindMask(di, hn::Eq(value, value));
  return hn::DemoteTo(d16, hn::IfThenElse(number, hn::BitCast(di, rounded), hn::Set(di, 0x7FC0)));
}

void round_stochastic(const float* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to, int64_t numel,
                      RoundingKey key, uint32_t index) {
  const Fp32Tag d;
  const hn::Rebind<uint16_t, Fp32Tag> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    hn::StoreU(round_vector(d, hn::LoadU(d, from + i), key, index + static_cast<uint32_t>(i)), d16,
               to + i);
  }
  if (i == numel) return;
  const auto count = static_cast<size_t>(numel - i);
  const Tail<float> tail(from + i, count);
  Tail<uint16_t> narrow(nullptr, 0);
  for (size_t j = 0; j < kMaxLanes; j += static_cast<size_t>(lanes)) {
    hn::StoreU(round_vector(d, hn::LoadU(d, tail.values + j), key,
                            index + static_cast<uint32_t>(static_cast<size_t>(i) + j)),
               d16, narrow.values + j);
  }
  narrow.write(to + i, count);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(widen);
HWY_EXPORT(round_stochastic);
void widen(const uint16_t* from, float* to, int64_t numel) {
  HWY_DYNAMIC_DISPATCH(widen)(from, to, numel);
}
void round_stochastic(const float* from, uint16_t* to, int64_t numel, RoundingKey key,
                      uint32_t index) {
  HWY_DYNAMIC_DISPATCH(round_stochastic)(from, to, numel, key, index);
}
}  // namespace zero::optim::kernels
#endif
