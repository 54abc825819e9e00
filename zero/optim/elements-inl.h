// Loads and stores of fp32, bf16 and fp16 arrays as fp32 vectors. Kernels include this file once
// for each instruction set. Narrowing rounds to nearest, ties to even, and NaN stays NaN. All of it
// uses integer and exact operations, so that every instruction set gives the same bits, whatever
// the thread's denormal mode.

// Highway's per-target include guard.
#if defined(ZERO_OPTIM_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_OPTIM_ELEMENTS_INL_H_
#undef ZERO_OPTIM_ELEMENTS_INL_H_
#else
#define ZERO_OPTIM_ELEMENTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Vectors have at most 16 lanes, so that a tail's padded copy has a fixed size.
inline constexpr size_t kMaxLanes = 16;
using Fp32Tag = hn::CappedTag<float, kMaxLanes>;

struct Fp32 {
  using Stored = float;
};
struct Bf16 {
  using Stored = uint16_t;
};
struct Fp16 {
  using Stored = uint16_t;
};
/// Says that there is no low-precision copy of the parameter.
struct Absent {
  using Stored = uint16_t;
};
/// Stores of this type bypass the caches. They begin on multiples of a whole vector, and
/// hwy::FlushStream() must follow the last of them.
template <class Narrow>
struct Streamed {
  using Stored = typename Narrow::Stored;
};

template <class D>
HWY_INLINE hn::Vec<D> load(Fp32, D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(Bf16, D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

template <class D>
HWY_INLINE hn::Vec<D> load(Fp16, D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const auto bits = hn::BitCast(di, hn::PromoteTo(hn::Rebind<uint32_t, D>(), hn::LoadU(d16, from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFF));
  // The exponent's bias grows from 15 to 127, and by as much again for infinity and NaN.
  const auto rebias = hn::Set(di, 112 << 23);
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto special = hn::Add(normal, rebias);
  const auto subnormal =
      hn::BitCast(di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24F)));
  auto result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7BFF)), special, normal);
  result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x0400)), subnormal, result);
  return hn::BitCast(d, hn::Or(result, sign));
}

template <class D>
HWY_INLINE void store(Fp32, D d, hn::Vec<D> value, float* to) {
  hn::StoreU(value, d, to);
}

template <class D>
using Narrow16 = hn::Vec<hn::Rebind<uint16_t, D>>;

template <class D>
HWY_INLINE Narrow16<D> narrow(Bf16, [[maybe_unused]] D d, hn::Vec<D> value) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))));
  const auto number = hn::RebindMask(di, hn::Eq(value, value));
  const auto result = hn::IfThenElse(number, hn::BitCast(di, rounded), hn::Set(di, 0x7FC0));
  return hn::DemoteTo(d16, result);
}

template <class D>
HWY_INLINE Narrow16<D> narrow(Fp16, [[maybe_unused]] D d, hn::Vec<D> value) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const auto bits = hn::BitCast(di, value);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0x0FFF)));
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(di, 112 << 23)));
  // The spacing of fp32 values at 0.5 is that of fp16's subnormal values, so this addition rounds
  // to them.
  const auto half = hn::Set(d, 0.5F);
  const auto subnormal =
      hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(di, half));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), subnormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477FFFFF)), hn::Set(di, 0x7C00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7F800000)), hn::Set(di, 0x7E00), result);
  return hn::DemoteTo(d16, hn::Or(result, sign));
}

template <class Narrow, class D>
HWY_INLINE void store(Narrow, D d, hn::Vec<D> value, uint16_t* to) {
  hn::StoreU(narrow(Narrow(), d, value), hn::Rebind<uint16_t, D>(), to);
}

template <class Narrow, class D>
HWY_INLINE void store(Streamed<Narrow>, D d, hn::Vec<D> value, uint16_t* to) {
  hn::Stream(narrow(Narrow(), d, value), hn::Rebind<uint16_t, D>(), to);
}

template <class D>
HWY_INLINE void store(Absent, D, hn::Vec<D>, uint16_t*) {}

/// Says that master weights are fp32 numbers with `Narrow` copies (or none), which are only
/// written.
template <class Narrow>
struct Whole {
  using Stored = float;
  using Parameter = typename Narrow::Stored;
  static constexpr bool kReadsParameter = false;
};
/// Says that master weights are split: these are their lower halves, and the bf16 parameters are
/// the upper ones. See Note [Split master weights] in halves.h.
struct Split {
  using Stored = uint16_t;
  using Parameter = uint16_t;
  static constexpr bool kReadsParameter = true;
};

template <class Narrow, class D>
HWY_INLINE hn::Vec<D> load(Whole<Narrow>, D d, const float* master, const void* /*parameter*/) {
  return hn::LoadU(d, master);
}

template <class Narrow, class D>
HWY_INLINE void store(Whole<Narrow>, D d, hn::Vec<D> value, float* master,
                      typename Narrow::Stored* parameter) {
  hn::StoreU(value, d, master);
  store(Narrow(), d, value, parameter);
}

template <class D>
HWY_INLINE hn::Vec<D> load(Split, D d, const uint16_t* lower, const uint16_t* upper) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int16_t, D> di16;
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto rest = hn::PromoteTo(di, hn::BitCast(di16, hn::LoadU(d16, lower)));
  const auto high = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, upper)));
  return hn::BitCast(d, hn::Add(high, hn::BitCast(du, rest)));
}

template <class D>
HWY_INLINE void store(Split, [[maybe_unused]] D d, hn::Vec<D> value, uint16_t* lower,
                      uint16_t* upper) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, value);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(du, 0x8000)));
  const auto low = hn::And(bits, hn::Set(du, 0xFFFF));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, low)), d16, lower);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, high)), d16, upper);
}

/// A padded copy of the last `count` elements of an array, on which the vector code runs. `write`
/// puts the elements back.
template <class T>
struct Tail {
  HWY_ALIGN T values[kMaxLanes] = {};

  Tail(const T* from, size_t count) {
    if (from) std::memcpy(values, from, count * sizeof(T));
  }
  void write(T* to, size_t count) const {
    if (to) std::memcpy(to, values, count * sizeof(T));
  }
};

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
