// The work of one thread of a device's kernel, in plain C++.
//
// Note [Kernels in plain C++]
// The kernels of a device launch the functions here, which do not depend on any device. A compiler
// for a device may call constexpr functions there (nvcc with --expt-relaxed-constexpr). The tests
// run the same source on the CPU, and compare it with the plain reference in bits. A device must
// also keep to Note [Same bits everywhere] in kernels.h: it uses no fused multiply-add, and divides
// and takes roots as IEEE 754 says. Narrowing uses integer and exact operations, as in
// elements-inl.h.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "zero/base/error.h"
#include "zero/optim/adagrad_step.h"
#include "zero/optim/adamw_step.h"
#include "zero/optim/halves.h"
#include "zero/optim/kernels.h"
#include "zero/optim/lion_step.h"
#include "zero/optim/moment.h"
#include "zero/optim/muon_step.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/schedule_free_step.h"
#include "zero/optim/sgd_step.h"

namespace zero::optim::device {

// These are the types of numbers in an array. `widen` converts to fp32 and `narrow` from fp32, to
// nearest with ties to even; NaN stays NaN.

struct Fp32 {
  using Stored = float;
  static constexpr float widen(float stored) { return stored; }
  static constexpr float narrow(float value) { return value; }
};

struct Bf16 {
  using Stored = uint16_t;
  static constexpr float widen(uint16_t stored) {
    return std::bit_cast<float>(static_cast<uint32_t>(stored) << 16);
  }
  static constexpr uint16_t narrow(float value) {
    if (value != value) return 0x7FC0;
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + ((bits >> 16) & 1U) + 0x7FFFU) >> 16);
  }
};

struct Fp16 {
  using Stored = uint16_t;
  static constexpr float widen(uint16_t stored) {
    const auto sign = (stored & 0x8000U) << 16;
    const auto magnitude = stored & 0x7FFFU;
    if (magnitude < 0x0400U) {  // subnormal
      const auto value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F;
      return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
    }
    // The exponent's bias grows from 15 to 127, and by as much again for infinity and NaN.
    constexpr uint32_t kRebias = 112U << 23;
    const auto normal = (magnitude << 13) + kRebias;
    return std::bit_cast<float>((magnitude > 0x7BFFU ? normal + kRebias : normal) | sign);
  }
  static constexpr uint16_t narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const auto sign = (bits >> 16) & 0x8000U;
    const auto magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return static_cast<uint16_t>(0x7E00U | sign);  // NaN
    if (magnitude > 0x477FFFFFU) return static_cast<uint16_t>(0x7C00U | sign);  // infinity
    if (magnitude < 0x38800000U) {
      // The spacing of fp32 values at 0.5 is that of fp16's subnormal values, so this addition
      // rounds to them.
      const float rounded = std::bit_cast<float>(magnitude) + 0.5F;
      return static_cast<uint16_t>((std::bit_cast<uint32_t>(rounded) - 0x3F000000U) | sign);
    }
    const auto rounded = magnitude + ((magnitude >> 13) & 1U) + 0x0FFFU;
    return static_cast<uint16_t>(((rounded - (112U << 23)) >> 13) | sign);
  }
};

/// Says that there is no low-precision copy of the parameter.
struct Absent {
  using Stored = uint16_t;
};

/// Says that the bf16 parameters are the upper halves of the master weights, whose lower halves lie
/// apart: Note [Split master weights] in halves.h.
struct UpperHalves {
  using Stored = uint16_t;
};

/// Scales a gradient and limits it, before anything else.
struct Scale {
  float factor;
  float limit;  ///< Operands::gradient_limit
  constexpr float of(float gradient) const {
    const float scaled = gradient * factor;
    if (scaled > limit) return limit;
    return scaled < -limit ? -limit : scaled;
  }
};

/// The arrays of Operands, with their types.
template <class GradientType, class ParameterType, int kStateCount>
struct Arrays {
  using Gradient = GradientType;
  using Parameter = ParameterType;
  static constexpr int kStates = kStateCount;
  static constexpr bool kSplit = std::is_same_v<Parameter, UpperHalves>;
  using Master = std::conditional_t<kSplit, uint16_t, float>;

  int64_t numel;
  const typename Gradient::Stored* gradient;
  Master* master;  ///< or the lower halves
  typename Parameter::Stored* parameter;
  std::array<float*, kMostStates> state;
};

/// The elements that one thread updates if all arrays begin at multiples of this many elements: it
/// then reads and writes those of an array at once. Otherwise a thread updates one element.
inline constexpr int kWidth = 4;

/// kCount neighbouring elements of an array.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};
template <int kCount, class T>
constexpr Pack<T, kCount> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}
template <int kCount, class T>
constexpr void store(const Pack<T, kCount>& pack, T* to) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

/// Updates elements [begin, begin + kCount).
template <int kCount, class Step, class Arrays>
constexpr void update_pack(const Step& step, Scale scale, const Arrays& arrays, int64_t begin) {
  using Gradient = typename Arrays::Gradient;
  using Parameter = typename Arrays::Parameter;
  constexpr bool kHasCopy = !std::is_same_v<Parameter, Absent>;
  constexpr bool kSplit = Arrays::kSplit;
  const auto gradient = load<kCount>(arrays.gradient + begin);
  auto master = load<kCount>(arrays.master + begin);
  Pack<float, kCount> states[kMostStates] = {};
  for (int s = 0; s < Arrays::kStates; ++s)
    states[s] = load<kCount>(arrays.state[static_cast<size_t>(s)] + begin);
  Pack<typename Parameter::Stored, kCount> copy{};
  if constexpr (kSplit) copy = load<kCount>(arrays.parameter + begin);
  for (int i = 0; i < kCount; ++i) {
    float weight = 0;
    if constexpr (kSplit) {
      weight = join({copy.values[i], master.values[i]});
    } else {
      weight = master.values[i];
    }
    std::array<float, kMostStates> state{};
    for (int s = 0; s < Arrays::kStates; ++s) state[static_cast<size_t>(s)] = states[s].values[i];
    step.apply(weight, scale.of(Gradient::widen(gradient.values[i])), state);
    for (int s = 0; s < Arrays::kStates; ++s) states[s].values[i] = state[static_cast<size_t>(s)];
    if constexpr (kSplit) {
      const auto halves = split(weight);
      copy.values[i] = halves.upper;
      master.values[i] = halves.lower;
    } else {
      master.values[i] = weight;
      if constexpr (kHasCopy) copy.values[i] = Parameter::narrow(weight);
    }
  }
  store(master, arrays.master + begin);
  for (int s = 0; s < Arrays::kStates; ++s)
    store(states[s], arrays.state[static_cast<size_t>(s)] + begin);
  if constexpr (kHasCopy) store(copy, arrays.parameter + begin);
}

/// Does the work of thread `index` of an update: kCount elements, or fewer in the last thread.
template <int kCount, class Step, class Arrays>
constexpr void update_by_thread(const Step& step, Scale scale, const Arrays& arrays,
                                int64_t index) {
  const int64_t begin = index * kCount;
  if (begin + kCount <= arrays.numel) {
    update_pack<kCount>(step, scale, arrays, begin);
    return;
  }
  for (int64_t i = begin; i < arrays.numel; ++i) update_pack<1>(step, scale, arrays, i);
}

/// Returns the part of a block's sum of squares that lane `lane` of kNormLanes adds up. The block
/// has `count` elements, at most kNormBlock.
template <class Values>
constexpr double lane_squares(const typename Values::Stored* block, int64_t count, int64_t lane) {
  using Stored = typename Values::Stored;
  double sum = 0;
  const auto add = [&](Stored stored) {
    const double value = Values::widen(stored);
    sum += value * value;
  };
  // Some elements are read while those before them are added, since a device waits long for its
  // memory.
  constexpr int64_t kAhead = 32, kStep = kernels::kNormLanes;
  std::array<Stored, kAhead> ahead{};
  const auto read = [&](int64_t from) {
    for (int64_t k = 0; k < kAhead; ++k) ahead[static_cast<size_t>(k)] = block[from + k * kStep];
  };
  const auto whole = [&](int64_t from) { return from + (kAhead - 1) * kStep < count; };
  int64_t i = lane;
  if (whole(i)) read(i);
  while (whole(i)) {
    const auto now = ahead;
    i += kAhead * kStep;
    if (whole(i)) read(i);
    for (const auto stored : now) add(stored);
  }
  for (; i < count; i += kStep) add(block[i]);
  return sum;
}

/// Returns `sum` plus `count` values, which are added one after the other.
constexpr double add_in_order(double sum, const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

/// Arrays whose squares one kernel adds up. The blocks of all of them are numbered in one order.
struct NormArrays {
  static constexpr int kMost = 128;  ///< of one kernel, whose arguments are at most 4 KiB
  struct Array {
    const void* values;
    int64_t numel;
    int64_t first_block;
  };
  int count = 0;
  int64_t blocks = 0;
  Array arrays[kMost];

  /// Adds an array; the caller looks that there are fewer than kMost.
  void add(const void* values, int64_t numel) {
    arrays[count++] = {values, numel, blocks};
    blocks += (numel + kernels::kNormBlock - 1) / kernels::kNormBlock;
  }
  /// Returns the number of the array to which a block belongs.
  constexpr int of_block(int64_t block) const {
    int low = 0;
    int high = count;  // its first block lies behind this one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (arrays[middle].first_block <= block ? low : high) = middle;
    }
    return low;
  }
  /// Returns the number of an array's blocks.
  constexpr int64_t blocks_of(int array) const {
    return (array + 1 < count ? arrays[array + 1].first_block : blocks) - arrays[array].first_block;
  }
};
static_assert(sizeof(NormArrays) < 4000);

// The host calls the functions below to choose the kernel that a call needs.

inline AdamWStep<float> step_of(const AdamW& optimizer, Moment moment) {
  return {optimizer, moment};
}
inline SgdStep<float> step_of(const Sgd& optimizer, Moment moment) { return {optimizer, moment}; }
inline AdagradStep<float> step_of(const Adagrad& optimizer, Moment moment) {
  return {optimizer, moment};
}
inline LionStep<float> step_of(const Lion& optimizer, Moment moment) { return {optimizer, moment}; }
inline ScheduleFreeStep<float> step_of(const ScheduleFreeAdamW& optimizer, Moment moment) {
  return {optimizer, moment};
}

/// Calls f(count) with the number of states that a Step changes: all those of its operands, but
/// none in a second sweep.
template <class F>
void with_states(const AdamWStep<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 2>());
}
template <class F>
void with_states(const SgdStep<float>& step, const F& f) {
  if (step.keeps) return f(std::integral_constant<int, 1>());
  f(std::integral_constant<int, 0>());
}
template <class F>
void with_states(const AdagradStep<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 1>());
}
template <class F>
void with_states(const LionStep<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 1>());
}
template <class F>
void with_states(const ScheduleFreeStep<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 2>());
}

template <class F>
void with_states(const MuonDirection<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 1>());
}
template <class F>
void with_states(const MatrixStep<float>& /*step*/, const F& f) {
  f(std::integral_constant<int, 0>());
}

/// Calls f(type) with the type of an array's numbers. `dtype` is Float, BFloat16 or Half.
template <class F>
void with_numbers(c10::ScalarType dtype, const F& f) {
  if (dtype == c10::ScalarType::Float) return f(Fp32());
  if (dtype == c10::ScalarType::BFloat16) return f(Bf16());
  ensure(dtype == c10::ScalarType::Half, "a kernel's numbers are fp32, bf16 or fp16");
  f(Fp16());
}

/// Returns whether every array of the operands begins at a multiple of kWidth elements.
inline bool is_aligned(const Operands& operands) {
  const auto fits = [](const void* array, size_t bytes) {
    return reinterpret_cast<uintptr_t>(array) % (kWidth * bytes) == 0;
  };
  return fits(operands.master, sizeof(float)) && fits(operands.lower, sizeof(uint16_t)) &&
         fits(operands.state[0], sizeof(float)) && fits(operands.state[1], sizeof(float)) &&
         fits(operands.parameter, sizeof(uint16_t)) &&
         fits(operands.gradient, c10::elementSize(operands.gradient_dtype));
}

/// Calls f(width, step, arrays) with the arguments of update_by_thread; `width` is an
/// integral_constant. `optimizer` must be element-wise, or Muon, whose sweep the moment says. The
/// master weights of a first sweep are the array that takes the directions, and the gradient of a
/// second sweep is that of directions.
template <class F>
void with_update(const Optimizer& optimizer, Moment moment, const Operands& operands, const F& f) {
  const auto with_types = [&](const auto& step, auto states, auto gradient, auto parameter) {
    using Gradient = decltype(gradient);
    using Parameter = decltype(parameter);
    using Typed = Arrays<Gradient, Parameter, states.value>;
    typename Typed::Master* master = nullptr;
    if constexpr (Typed::kSplit) {
      master = operands.lower;
    } else {
      master = operands.master;
    }
    const Typed arrays{.numel = operands.numel,
                       .gradient = static_cast<const typename Gradient::Stored*>(operands.gradient),
                       .master = master,
                       .parameter = static_cast<typename Parameter::Stored*>(operands.parameter),
                       .state = operands.state};
    if (is_aligned(operands)) return f(std::integral_constant<int, kWidth>(), step, arrays);
    f(std::integral_constant<int, 1>(), step, arrays);
  };
  const auto with_step = [&](const auto& step) {
    with_states(step, [&](auto states) {
      with_numbers(operands.gradient_dtype, [&](auto gradient) {
        if (operands.lower != nullptr) return with_types(step, states, gradient, UpperHalves());
        if (operands.parameter == nullptr) return with_types(step, states, gradient, Absent());
        if (operands.parameter_dtype == c10::ScalarType::BFloat16)
          return with_types(step, states, gradient, Bf16());
        with_types(step, states, gradient, Fp16());
      });
    });
  };
  std::visit(
      [&](const auto& known) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(known)>, Muon>) {
          ensure(moment.sweep != Sweep::whole, "Muon's update takes two sweeps");
          if (moment.sweep == Sweep::first) return with_step(MuonDirection<float>(known, moment));
          with_step(MatrixStep<float>(known, moment));
        } else if constexpr (requires { step_of(known, moment); }) {
          with_step(step_of(known, moment));
        } else {
          ensure(false, "a device's kernels are of element-wise optimizers and of Muon");
        }
      },
      optimizer);
}

}  // namespace zero::optim::device
