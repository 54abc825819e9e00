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

#include "zero/comm/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Streamed vectors must be whole registers: a half of 16 bytes is one, a half of less is not.
#if HWY_MAX_BYTES >= 32
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Sums whole vectors of [from, numel), and returns their end. Four vectors at a time keep the loads
// of one array together, so that each array is read as a stream. If the inputs are few and one
// block, `kInputs` is their number: with the pointers in registers two arrays are summed in 20 %
// less time. 0 allows any number.
template <class In, class Out, bool kStream, size_t kInputs>
int64_t sum_vectors(Outputs outputs, std::span<const void* const> inputs, int64_t from,
                    int64_t numel, size_t inputs_a_block) {
  using Element = const typename In::Element;
  using Sum = hn::Vec<typename In::Tag>;
  const typename In::Tag d;
  const typename Out::StoredTag stored_tag;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  std::array<Element*, kInputs> fixed;
  for (size_t k = 0; k < kInputs; ++k) fixed[k] = static_cast<Element*>(inputs[k]);
  const size_t count = kInputs > 0 ? kInputs : inputs.size();
  const size_t block = kInputs > 0 ? kInputs : std::min(inputs_a_block, count);
  const auto at = [&](size_t k) {
    if constexpr (kInputs > 0) {
      return fixed[k];
    } else {
      return static_cast<Element*>(inputs[k]);
    }
  };
  const auto store = [&](Sum v, typename Out::Element* to) {
    if constexpr (kStream && kCanStream) {
      hn::Stream(Out::stored(d, v), stored_tag, to);
    } else {
      hn::StoreU(Out::stored(d, v), stored_tag, to);
    }
  };
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(Element));
  int64_t i = from;
  const auto load_four = [&](size_t k, Sum & a, Sum & b, Sum & c, Sum & e)
      __attribute__((always_inline)) {
    const auto* first = at(k) + i;
    a = In::load(d, first);
    b = In::load(d, first + lanes);
    c = In::load(d, first + 2 * lanes);
    e = In::load(d, first + 3 * lanes);
  };
  // Adds the other inputs of the block that begins at input `begin`.
  const auto add_others = [&](size_t begin, Sum & a, Sum & b, Sum & c, Sum & e)
      __attribute__((always_inline)) {
    for (size_t k = begin + 1; k < std::min(begin + block, count); ++k) {
      const auto* next = at(k) + i;
      a = hn::Add(a, In::load(d, next));
      b = hn::Add(b, In::load(d, next + lanes));
      c = hn::Add(c, In::load(d, next + 2 * lanes));
      e = hn::Add(e, In::load(d, next + 3 * lanes));
    }
  };
  const auto add_one = [&](size_t begin) __attribute__((always_inline)) {
    auto a = In::load(d, at(begin) + i);
    for (size_t k = begin + 1; k < std::min(begin + block, count); ++k)
      a = hn::Add(a, In::load(d, at(k) + i));
    return a;
  };
  for (; i + 4 * lanes <= numel; i += 4 * lanes) {
    Sum a, b, c, e;
    load_four(0, a, b, c, e);
    if constexpr (kStream) {
      for (size_t k = 0; k < count; ++k) {
        for (int64_t n = 0; n < 4 * lanes; n += kLine) prefetch_to_second_level(at(k) + i + n);
      }
    }
    add_others(0, a, b, c, e);
    for (size_t begin = block; begin < count; begin += block) {
      Sum next_a, next_b, next_c, next_e;
      load_four(begin, next_a, next_b, next_c, next_e);
      add_others(begin, next_a, next_b, next_c, next_e);
      a = hn::Add(a, next_a);
      b = hn::Add(b, next_b);
      c = hn::Add(c, next_c);
      e = hn::Add(e, next_e);
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
    auto a = add_one(0);
    for (size_t begin = block; begin < count; begin += block) a = hn::Add(a, add_one(begin));
    for (void* output : outputs) store(a, static_cast<typename Out::Element*>(output) + i);
  }
  if (kStream && kCanStream) hwy::FlushStream();
  return i;
}

template <class In, class Out>
int64_t sum_vectors(Outputs outputs, std::span<const void* const> inputs, int64_t from,
                    int64_t numel, bool stream, size_t block) {
  const auto of = [&]<bool kStream>(std::bool_constant<kStream>) {
    switch (block < inputs.size() ? 0 : inputs.size()) {
      case 2:
        return sum_vectors<In, Out, kStream, 2>(outputs, inputs, from, numel, block);
      case 4:
        return sum_vectors<In, Out, kStream, 4>(outputs, inputs, from, numel, block);
      default:
        return sum_vectors<In, Out, kStream, 0>(outputs, inputs, from, numel, block);
    }
  };
  return stream ? of(std::true_type()) : of(std::false_type());
}

int64_t SumVectors(Outputs outputs, c10::ScalarType output_dtype,
                   std::span<const void* const> inputs, c10::ScalarType input_dtype, int64_t from,
                   int64_t numel, bool stream, size_t block) {
  using c10::ScalarType;
  using FloatLanes = PlainLanes<float>;
  const auto into = [&]<class In, class Out>(In, Out) {
    return sum_vectors<In, Out>(outputs, inputs, from, numel, stream, block);
  };
  const bool widened = output_dtype != input_dtype;
  switch (input_dtype) {
    case ScalarType::Float:
      switch (output_dtype) {
        case ScalarType::BFloat16:
          return into(FloatLanes(), Bfloat16Lanes());
        case ScalarType::Half:
#if HWY_TARGET <= HWY_AVX2
          return into(FloatLanes(), HalfLanes());
#else
          return from;
#endif
        default:
          return into(FloatLanes(), FloatLanes());
      }
    case ScalarType::Double:
#if HWY_HAVE_FLOAT64
      return into(PlainLanes<double>(), PlainLanes<double>());
#else
      return from;
#endif
    case ScalarType::BFloat16:
      return widened ? into(Bfloat16Lanes(), FloatLanes()) : into(Bfloat16Lanes(), Bfloat16Lanes());
    case ScalarType::Half:
#if HWY_TARGET <= HWY_AVX2
      return widened ? into(HalfLanes(), FloatLanes()) : into(HalfLanes(), HalfLanes());
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

// Adds elements as `Sum`.
template <class In, class Sum, class Out>
void sum_plain(Outputs outputs, std::span<const void* const> inputs, int64_t from, int64_t numel,
               size_t block) {
  const size_t count = inputs.size();
  block = std::min(block, count);
  for (int64_t i = from; i < numel; ++i) {
    const auto at = [&](size_t k) {
      return static_cast<Sum>(static_cast<const In*>(inputs[k])[i]);
    };
    const auto sum_of_block = [&](size_t begin) {
      auto total = at(begin);
      for (size_t k = begin + 1; k < std::min(begin + block, count); ++k)
        total = static_cast<Sum>(total + at(k));
      return total;
    };
    auto total = sum_of_block(0);
    for (size_t begin = block; begin < count; begin += block)
      total = static_cast<Sum>(total + sum_of_block(begin));
    for (void* output : outputs) static_cast<Out*>(output)[i] = static_cast<Out>(total);
  }
}

void sum_plain(Outputs outputs, c10::ScalarType output_dtype, std::span<const void* const> inputs,
               c10::ScalarType input_dtype, int64_t from, int64_t numel, size_t block) {
  using c10::ScalarType;
  ensure(can_sum(input_dtype, output_dtype), "a sum of a dtype that has none");
  ensure(block > 0, "a sum of empty blocks");
  const auto into = [&]<class In, class Sum, class Out>(In, Sum, Out) {
    sum_plain<In, Sum, Out>(outputs, inputs, from, numel, block);
  };
  const auto into_output = [&]<class In>(In) {  // the float types, added in fp32
    if (output_dtype == ScalarType::BFloat16) return into(In(), float(), c10::BFloat16());
    if (output_dtype == ScalarType::Half) return into(In(), float(), c10::Half());
    return into(In(), float(), float());
  };
  switch (input_dtype) {
    case ScalarType::Float:
      return into_output(float());
    case ScalarType::BFloat16:
      return into_output(c10::BFloat16());
    case ScalarType::Half:
      return into_output(c10::Half());
    case ScalarType::Double:
      return into(double(), double(), double());
    case ScalarType::Int:  // unsigned, whose overflow is defined
      return into(uint32_t(), uint32_t(), uint32_t());
    case ScalarType::Long:
      return into(uint64_t(), uint64_t(), uint64_t());
    default:
      return into(uint8_t(), uint8_t(), uint8_t());
  }
}

}  // namespace

c10::ScalarType partial_dtype(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

bool can_sum(c10::ScalarType input, c10::ScalarType output) {
  using c10::ScalarType;
  switch (input) {
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return output == input || output == ScalarType::Float;
    case ScalarType::Float:
      return output == input || output == ScalarType::BFloat16 || output == ScalarType::Half;
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
         c10::ScalarType input_dtype, int64_t numel, bool stream, int64_t block) {
  ensure(can_sum(input_dtype, output_dtype), "a sum of a dtype that has none");
  const auto inputs_a_block = static_cast<size_t>(std::max<int64_t>(block, 0));
  // Streaming needs aligned stores, so the elements before the first aligned one are added plainly.
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
    sum_plain(outputs, output_dtype, inputs, input_dtype, 0, from, inputs_a_block);
  }
  from = HWY_DYNAMIC_DISPATCH(SumVectors)(outputs, output_dtype, inputs, input_dtype, from, numel,
                                          stream, inputs_a_block);
  sum_plain(outputs, output_dtype, inputs, input_dtype, from, numel, inputs_a_block);
}

void sum_reference(void* output, c10::ScalarType output_dtype, std::span<const void* const> inputs,
                   c10::ScalarType input_dtype, int64_t numel, int64_t block) {
  sum_plain({&output, 1}, output_dtype, inputs, input_dtype, 0, numel,
            static_cast<size_t>(std::max<int64_t>(block, 0)));
}

}  // namespace zero::comm
#endif  // HWY_ONCE
