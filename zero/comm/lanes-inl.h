// Loads and stores arrays as vectors to compute with; included once for each instruction set.

// Highway's per-target include guard.
#if defined(ZERO_COMM_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_COMM_LANES_INL_H_
#undef ZERO_COMM_LANES_INL_H_
#else
#define ZERO_COMM_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Loads lanes of an element type, and converts them for storing.
template <class T>
struct PlainLanes {
  using Element = T;
  using Tag = hn::ScalableTag<T>;
  using StoredTag = Tag;
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const T* from) { return hn::LoadU(d, from); }
  static HWY_INLINE hn::Vec<Tag> stored(Tag, hn::Vec<Tag> v) { return v; }
};

struct Bfloat16Lanes {
  using Element = uint16_t;
  using Tag = hn::ScalableTag<float>;
  using StoredTag = hn::Rebind<uint16_t, Tag>;
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const uint16_t* from) {
    const hn::RebindToUnsigned<Tag> du;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(StoredTag(), from))));
  }
  // Rounds to nearest, ties to even; every NaN becomes the one that c10::BFloat16 makes.
  static HWY_INLINE hn::Vec<StoredTag> stored(Tag, hn::Vec<Tag> v) {
    const hn::RebindToUnsigned<Tag> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))));
    // Ne is false for NaN on AVX-512.
    const auto number = hn::RebindMask(du, hn::Eq(v, v));
    const auto result = hn::IfThenElse(number, rounded, hn::Set(du, 0x7FC0));
    // The only demotion to 16 bits saturates as signed, so the values are sign-extended first.
    const hn::RebindToSigned<Tag> di;
    const hn::Rebind<int16_t, Tag> narrow;
    const auto extended = hn::ShiftRight<16>(hn::BitCast(di, hn::ShiftLeft<16>(result)));
    return hn::BitCast(StoredTag(), hn::DemoteTo(narrow, extended));
  }
};

#if HWY_TARGET <= HWY_AVX2  // these sets convert in hardware, which keeps subnormals
struct HalfLanes {
  using Element = uint16_t;
  using Tag = hn::ScalableTag<float>;
  using StoredTag = hn::Rebind<uint16_t, Tag>;
  using HalfTag = hn::Rebind<hwy::float16_t, Tag>;
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const uint16_t* from) {
    return hn::PromoteTo(d, hn::BitCast(HalfTag(), hn::LoadU(StoredTag(), from)));
  }
  static HWY_INLINE hn::Vec<StoredTag> stored(Tag, hn::Vec<Tag> v) {
    return hn::BitCast(StoredTag(), hn::DemoteTo(HalfTag(), v));
  }
};
#endif

}  // namespace zero::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
