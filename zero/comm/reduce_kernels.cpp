#include "zero/comm/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include "zero/base/error.h"
#include "zero/base/streaming.h"

#include <hwy/cache_control.h>

// The vector code below is compiled once for each instruction set; Highway includes this file again
// for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/comm/reduce_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Streamed vectors must be whole registers: a half of 16 bytes is one, a half of less is not.
#if HWY_MAX_BYTES >= 32
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// How the lanes of an element type are loaded for the sum, and made into what is stored after it.
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
  // To nearest, ties to even; every NaN becomes the one that c10::BFloat16 makes.
  static HWY_INLINE hn::Vec<StoredTag> stored(Tag, hn::Vec<Tag> v) {
    const hn::RebindToUnsigned<Tag> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))));
    const auto is_nan = hn::RebindMask(du, hn::Ne(v, v));
    const auto result = hn::IfThenElse(is_nan, hn::Set(du, 0x7FC0), rounded);
    // The values fit in 16 bits, but the only demotion there is takes them as signed and saturates:
    // so sign-extend first.
    const hn::RebindToSigned<Tag> di;
    const hn::Rebind<int16_t, Tag> narrow;
    const auto extended = hn::ShiftRight<16>(hn::BitCast(di, hn::ShiftLeft<16>(result)));
    return hn::BitCast(StoredTag(), hn::DemoteTo(narrow, extended));
  }
};

#if HWY_TARGET <= HWY_AVX2  // with conversions in hardware, which keep subnormals
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

// Whole vectors of [from, numel); returns where they end. Four vectors at a time keep the loads of
// one array together, so that each array is read as a stream. `kInputs` is their number where it is
// small: with the pointers in registers two arrays are summed in 20 % less time. 0: any number.
template <class In, class Out, bool kStream, size_t kInputs>
int64_t sum_vectors(Outputs outputs, std::span<const void* const> inputs, int64_t from,
                    int64_t numel) {
  using Element = const typename In::Element;
  const typename In::Tag d;
  const typename Out::StoredTag stored_tag;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  std::array<Element*, kInputs> fixed;
  for (size_t k = 0; k < kInputs; ++k) fixed[k] = static_cast<Element*>(inputs[k]);
  const size_t count = kInputs > 0 ? kInputs : inputs.size();
  const auto at = [&](size_t k) {
    if constexpr (kInputs > 0) {
      return fixed[k];
    } else {
      return static_cast<Element*>(inputs[k]);
    }
  };
  const auto store = [&](hn::Vec<typename In::Tag> v, typename Out::Element* to) {
    if constexpr (kStream && kCanStream) {
      hn::Stream(Out::stored(d, v), stored_tag, to);
    } else {
      hn::StoreU(Out::stored(d, v), stored_tag, to);
    }
  };
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(Element));
  int64_t i = from;
  for (; i + 4 * lanes <= numel; i += 4 * lanes) {
    const auto* first = at(0) + i;
    auto a = In::load(d, first);
    auto b = In::load(d, first + lanes);
    auto c = In::load(d, first + 2 * lanes);
    auto e = In::load(d, first + 3 * lanes);
    if constexpr (kStream) {
      for (size_t k = 0; k < count; ++k) {
        for (int64_t n = 0; n < 4 * lanes; n += kLine) prefetch_to_second_level(at(k) + i + n);
      }
    }
    for (size_t k = 1; k < count; ++k) {
      const auto* next = at(k) + i;
      a = hn::Add(a, In::load(d, next));
      b = hn::Add(b, In::load(d, next + lanes));
      c = hn::Add(c, In::load(d, next + 2 * lanes));
      e = hn::Add(e, In::load(d, next + 3 * lanes));
    }
    for (void* output : outputs) {
      auto* out = static_cast<typename Out::Element*>(output) + i;
      store(a, out);
      store(b, out + lanes);
      store(c, out + 2 * lanes);
      store(e, out + 3 * lanes);
    }
  }
  for (; i + lanes <= numel; i += lanes) {
    auto a = In::load(d, at(0) + i);
    for (size_t k = 1; k < count; ++k) a = hn::Add(a, In::load(d, at(k) + i));
    for (void* output : outputs) store(a, static_cast<typename Out::Element*>(output) + i);
  }
  if (kStream && kCanStream) hwy::FlushStream();
  return i;
}

template <class In, class Out>
int64_t sum_vectors(Outputs outputs, std::span<const void* const> inputs, int64_t from,
                    int64_t numel, bool stream) {
  if (!stream) return sum_vectors<In, Out, false, 0>(outputs, inputs, from, numel);
  switch (inputs.size()) {
    case 2:
      return sum_vectors<In, Out, true, 2>(outputs, inputs, from, numel);
    case 4:
      return sum_vectors<In, Out, true, 4>(outputs, inputs, from, numel);
    default:
      return sum_vectors<In, Out, true, 0>(outputs, inputs, from, numel);
  }
}

int64_t SumVectors(Outputs outputs, c10::ScalarType output_dtype,
                   std::span<const void* const> inputs, c10::ScalarType input_dtype, int64_t from,
                   int64_t numel, bool stream) {
  using c10::ScalarType;
  using FloatLanes = PlainLanes<float>;
  const bool widened = output_dtype != input_dtype;
  switch (input_dtype) {
    case ScalarType::Float:
      return sum_vectors<FloatLanes, FloatLanes>(outputs, inputs, from, numel, stream);
    case ScalarType::Double:
#if HWY_HAVE_FLOAT64
      return sum_vectors<PlainLanes<double>, PlainLanes<double>>(outputs, inputs, from, numel,
                                                                 stream);
#else
      return from;
#endif
    case ScalarType::BFloat16:
      return widened
                 ? sum_vectors<Bfloat16Lanes, FloatLanes>(outputs, inputs, from, numel, stream)
                 : sum_vectors<Bfloat16Lanes, Bfloat16Lanes>(outputs, inputs, from, numel, stream);
    case ScalarType::Half:
#if HWY_TARGET <= HWY_AVX2
      return widened ? sum_vectors<HalfLanes, FloatLanes>(outputs, inputs, from, numel, stream)
                     : sum_vectors<HalfLanes, HalfLanes>(outputs, inputs, from, numel, stream);
#endif
    default:
      return from;  // integers: the plain loop is as good
  }
}

}  // namespace zero::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::comm {
namespace {

HWY_EXPORT(SumVectors);

// `Sum` is what the elements are added in.
template <class In, class Sum, class Out>
void sum_plain(Outputs outputs, std::span<const void* const> inputs, int64_t from, int64_t numel) {
  for (int64_t i = from; i < numel; ++i) {
    auto total = static_cast<Sum>(static_cast<const In*>(inputs[0])[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      total = static_cast<Sum>(total + static_cast<Sum>(static_cast<const In*>(inputs[k])[i]));
    }
    for (void* output : outputs) static_cast<Out*>(output)[i] = static_cast<Out>(total);
  }
}

void sum_plain(Outputs outputs, c10::ScalarType output_dtype, std::span<const void* const> inputs,
               c10::ScalarType input_dtype, int64_t from, int64_t numel) {
  using c10::ScalarType;
  ensure(can_sum(input_dtype, output_dtype), "a sum of a dtype that has none");
  const bool widened = output_dtype != input_dtype;
  switch (input_dtype) {
    case ScalarType::Float:
      return sum_plain<float, float, float>(outputs, inputs, from, numel);
    case ScalarType::Double:
      return sum_plain<double, double, double>(outputs, inputs, from, numel);
    case ScalarType::BFloat16:
      return widened ? sum_plain<c10::BFloat16, float, float>(outputs, inputs, from, numel)
                     : sum_plain<c10::BFloat16, float, c10::BFloat16>(outputs, inputs, from, numel);
    case ScalarType::Half:
      return widened ? sum_plain<c10::Half, float, float>(outputs, inputs, from, numel)
                     : sum_plain<c10::Half, float, c10::Half>(outputs, inputs, from, numel);
    case ScalarType::Int:  // unsigned, whose overflow is defined
      return sum_plain<uint32_t, uint32_t, uint32_t>(outputs, inputs, from, numel);
    case ScalarType::Long:
      return sum_plain<uint64_t, uint64_t, uint64_t>(outputs, inputs, from, numel);
    default:
      return sum_plain<uint8_t, uint8_t, uint8_t>(outputs, inputs, from, numel);
  }
}

}  // namespace

bool can_sum(c10::ScalarType input, c10::ScalarType output) {
  using c10::ScalarType;
  switch (input) {
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return output == input || output == ScalarType::Float;
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::Byte:
      return output == input;
    default:
      return false;
  }
}

void sum(Outputs outputs, c10::ScalarType output_dtype, std::span<const void* const> inputs,
         c10::ScalarType input_dtype, int64_t numel, bool stream) {
  ensure(can_sum(input_dtype, output_dtype), "a sum of a dtype that has none");
  // Streaming needs aligned stores; the elements before the first aligned one are added plainly.
  const auto width = static_cast<int64_t>(c10::elementSize(output_dtype));
  const auto misaligned = [](const void* output) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(output) % 64);
  };
  const int64_t first = misaligned(outputs.front());
  stream = stream && std::ranges::all_of(
                         outputs, [&](const void* output) { return misaligned(output) == first; });
  int64_t from = 0;
  if (stream) {
    from = first == 0 ? 0 : std::min(numel, (64 - first) / width);
    sum_plain(outputs, output_dtype, inputs, input_dtype, 0, from);
  }
  from = HWY_DYNAMIC_DISPATCH(SumVectors)(outputs, output_dtype, inputs, input_dtype, from, numel,
                                          stream);
  sum_plain(outputs, output_dtype, inputs, input_dtype, from, numel);
}

void sum_reference(void* output, c10::ScalarType output_dtype, std::span<const void* const> inputs,
                   c10::ScalarType input_dtype, int64_t numel) {
  sum_plain({&output, 1}, output_dtype, inputs, input_dtype, 0, numel);
}

}  // namespace zero::comm
#endif  // HWY_ONCE
