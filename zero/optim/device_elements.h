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
#include "zero/optim/narrow.h"
#include "zero/optim/narrow_kernel.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/schedule_free_step.h"
#include "zero/optim/sgd_step.h"
#include "zero/optim/state_format_kernel.h"

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

/// Says that the bf16 parameters are their own master weights: Note [Stochastic rounding] in
/// narrow.h.
struct OwnMaster {
  using Stored = uint16_t;
};

// These are the formats of an optimizer's states.

struct WideStates {
  using Stored = float;
};
struct Bf16States {
  using Stored = uint16_t;
};
struct CodedStates {
  using Stored = uint8_t;  ///< a byte of a block: Note [States in 8 bits] in state_format.h
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

/// The arrays of NarrowOperands, with their types. The numbers of all elements have the same upper
/// 32 bits.
template <class GradientType, class ParameterType, class StateType, int kStateCount>
struct NarrowArrays {
  using Gradient = GradientType;
  using Parameter = ParameterType;
  using State = StateType;
  static constexpr int kStates = kStateCount;
  static constexpr bool kSplit = std::is_same_v<Parameter, UpperHalves>;
  using Master = std::conditional_t<kSplit, uint16_t, float>;

  int64_t numel;
  const typename Gradient::Stored* gradient;
  Master* master;  ///< or the lower halves; null with OwnMaster
  typename Parameter::Stored* parameter;
  std::array<typename State::Stored*, kMostStates> state;
  std::array<Sign, kMostStates> signs;
  uint32_t first;  ///< the lower half of the first element's number
  kernels::RoundingKey weights_key;
  std::array<kernels::RoundingKey, kMostStates> keys;
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

/// Returns `value` in bf16, rounded by the random bits of the element with this number.
constexpr uint16_t round_stochastic(float value, kernels::RoundingKey key, uint32_t number) {
  if (value != value) return 0x7FC0;
  const auto random = kernels::random_bits(key, number) >> 16;
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + random) >> 16);
}

/// Updates the weights of elements [begin, begin + kCount), and `states`, which has their states.
template <int kCount, class Step, class Arrays>
constexpr void update_weights(const Step& step, Scale scale, const Arrays& arrays, int64_t begin,
                              Pack<float, kCount> (&states)[kMostStates]) {
  using Gradient = typename Arrays::Gradient;
  using Parameter = typename Arrays::Parameter;
  constexpr bool kHasCopy = !std::is_same_v<Parameter, Absent>;
  constexpr bool kOwn = std::is_same_v<Parameter, OwnMaster>;
  constexpr bool kSplit = Arrays::kSplit;
  const auto gradient = load<kCount>(arrays.gradient + begin);
  Pack<typename Arrays::Master, kCount> master{};
  if constexpr (!kOwn) master = load<kCount>(arrays.master + begin);
  Pack<typename Parameter::Stored, kCount> copy{};
  if constexpr (kSplit || kOwn) copy = load<kCount>(arrays.parameter + begin);
  for (int i = 0; i < kCount; ++i) {
    float weight = 0;
    if constexpr (kSplit) {
      weight = join({copy.values[i], master.values[i]});
    } else if constexpr (kOwn) {
      weight = Bf16::widen(copy.values[i]);
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
    } else if constexpr (kOwn) {
      copy.values[i] = round_stochastic(weight, arrays.weights_key,
                                        arrays.first + static_cast<uint32_t>(begin + i));
    } else {
      master.values[i] = weight;
      if constexpr (kHasCopy) copy.values[i] = Parameter::narrow(weight);
    }
  }
  if constexpr (!kOwn) store(master, arrays.master + begin);
  if constexpr (kHasCopy) store(copy, arrays.parameter + begin);
}

/// Updates elements [begin, begin + kCount).
template <int kCount, class Step, class Arrays>
constexpr void update_pack(const Step& step, Scale scale, const Arrays& arrays, int64_t begin) {
  Pack<float, kCount> states[kMostStates] = {};
  for (int s = 0; s < Arrays::kStates; ++s)
    states[s] = load<kCount>(arrays.state[static_cast<size_t>(s)] + begin);
  update_weights(step, scale, arrays, begin, states);
  for (int s = 0; s < Arrays::kStates; ++s)
    store(states[s], arrays.state[static_cast<size_t>(s)] + begin);
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

/// Does the same of elements whose states are in bf16, or in fp32 beside bf16 weights that are
/// their own master weights.
template <int kCount, class Step, class Arrays>
constexpr void update_narrow_pack(const Step& step, Scale scale, const Arrays& arrays,
                                  int64_t begin) {
  if constexpr (std::is_same_v<typename Arrays::State, WideStates>) {
    update_pack<kCount>(step, scale, arrays, begin);
  } else {
    Pack<float, kCount> states[kMostStates] = {};
    for (int s = 0; s < Arrays::kStates; ++s) {
      const auto stored = load<kCount>(arrays.state[static_cast<size_t>(s)] + begin);
      for (int i = 0; i < kCount; ++i) states[s].values[i] = Bf16::widen(stored.values[i]);
    }
    update_weights(step, scale, arrays, begin, states);
    for (int s = 0; s < Arrays::kStates; ++s) {
      Pack<uint16_t, kCount> stored{};
      for (int i = 0; i < kCount; ++i) {
        stored.values[i] =
            round_stochastic(states[s].values[i], arrays.keys[static_cast<size_t>(s)],
                             arrays.first + static_cast<uint32_t>(begin + i));
      }
      store(stored, arrays.state[static_cast<size_t>(s)] + begin);
    }
  }
}

/// Returns the value of a code in a group that has this unit (kernels::group_unit).
constexpr float value_of(uint8_t code, float unit, Sign sign) {
  const int32_t number = code & kernels::top_code(sign);
  const bool even = number < (1 << kernels::kCodeMantissa);  // they are evenly spaced
  const float magnitude =
      even ? static_cast<float>(number) * (1.0F / (1 << kernels::kCodeMantissa))
           : std::bit_cast<float>((number << kernels::kCodeRest) + (int32_t{126} << 23));
  const float value = magnitude * unit;
  if (sign == Sign::positive) return value;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (code & 0x80U) << 24);
}

/// Returns the code of a value, rounded by kCodeRest random bits. `inverse` is that of the group's
/// unit.
constexpr uint8_t code_of(float value, float inverse, uint32_t random, Sign sign) {
  const auto bits = std::bit_cast<uint32_t>(value);
  auto magnitude = bits & 0x7FFFFFFFU;
  if (magnitude <= 0x007FFFFFU) magnitude = 0;
  const float scaled = std::bit_cast<float>(magnitude) * inverse;
  const int32_t places = scaled < 1.0F
                             ? std::bit_cast<int32_t>(scaled + 1.0F) - std::bit_cast<int32_t>(1.0F)
                             : std::bit_cast<int32_t>(scaled) - (int32_t{126} << 23);
  int32_t code = (places + static_cast<int32_t>(random)) >> kernels::kCodeRest;
  if (code > kernels::top_code(sign)) code = kernels::top_code(sign);
  if (sign == Sign::positive) return static_cast<uint8_t>(code == 0 && magnitude > 0 ? 1 : code);
  return static_cast<uint8_t>(code == 0 ? 0U : static_cast<uint32_t>(code) | (bits >> 24 & 0x80U));
}

/// The values of elements that share an exponent; those that do not exist are zeros.
struct Group {
  float values[kCodedGroup];
};
/// Reads the first `count` elements of the group that begins at element `begin` of blocks, kCount
/// at once.
template <int kCount>
constexpr Group decode_group(const uint8_t* blocks, int64_t begin, int64_t count, Sign sign) {
  const auto* block = blocks + begin / kCodedBlock * kCodedBytes;
  const auto* codes = block + 4 + begin % kCodedBlock;
  const float unit = kernels::group_unit(block[begin % kCodedBlock / kCodedGroup], sign);
  Group group{};
  for (int i = 0; i < count; i += kCount) {
    const auto stored = load<kCount>(codes + i);
    for (int j = 0; j < kCount; ++j) group.values[i + j] = value_of(stored.values[j], unit, sign);
  }
  return group;
}
/// Writes them. The first of them has this number.
template <int kCount>
constexpr void encode_group(const Group& group, uint8_t* blocks, int64_t begin, int64_t count,
                            Sign sign, kernels::RoundingKey key, uint32_t number) {
  auto* block = blocks + begin / kCodedBlock * kCodedBytes;
  auto* codes = block + 4 + begin % kCodedBlock;
  uint32_t greatest = 0;
  for (const float value : group.values) {
    const auto magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU;
    if (magnitude > greatest) greatest = magnitude;
  }
  const auto exponent = kernels::group_exponent(greatest);
  block[begin % kCodedBlock / kCodedGroup] = exponent;
  const bool finite = exponent != 0 && exponent != 255;  // and not all zeros
  const float inverse = finite ? kernels::inverse_group_unit(exponent, sign) : 0;
  for (int i = 0; i < count; i += kCount) {
    Pack<uint8_t, kCount> stored{};
    for (int j = 0; j < kCount && finite; ++j) {
      const auto random = kernels::random_bits(key, number + static_cast<uint32_t>(i + j)) >>
                          (32 - kernels::kCodeRest);
      stored.values[j] = code_of(group.values[i + j], inverse, random, sign);
    }
    store(stored, codes + i);
  }
}

/// Updates the first `count` elements, a multiple of kCount, of a group of 8-bit states, which
/// begins at element `begin`.
template <int kCount, class Step, class Arrays>
constexpr void update_group(const Step& step, Scale scale, const Arrays& arrays, int64_t begin,
                            int64_t count) {
  Group groups[kMostStates] = {};
  for (int s = 0; s < Arrays::kStates; ++s) {
    const auto state = static_cast<size_t>(s);
    groups[s] = decode_group<kCount>(arrays.state[state], begin, count, arrays.signs[state]);
  }
  for (int i = 0; i < count; i += kCount) {
    Pack<float, kCount> states[kMostStates] = {};
    for (int s = 0; s < Arrays::kStates; ++s) {
      for (int j = 0; j < kCount; ++j) states[s].values[j] = groups[s].values[i + j];
    }
    update_weights(step, scale, arrays, begin + i, states);
    for (int s = 0; s < Arrays::kStates; ++s) {
      for (int j = 0; j < kCount; ++j) groups[s].values[i + j] = states[s].values[j];
    }
  }
  for (int s = 0; s < Arrays::kStates; ++s) {
    const auto state = static_cast<size_t>(s);
    encode_group<kCount>(groups[s], arrays.state[state], begin, count, arrays.signs[state],
                         arrays.keys[state], arrays.first + static_cast<uint32_t>(begin));
  }
}

/// Returns the elements that one thread of a narrow update updates.
template <class Arrays>
constexpr int narrow_elements(int width) {
  return std::is_same_v<typename Arrays::State, CodedStates> ? static_cast<int>(kCodedGroup)
                                                             : width;
}

/// Does the work of thread `index` of a narrow update, of narrow_elements(kCount) elements or fewer
/// in the last thread.
template <int kCount, class Step, class Arrays>
constexpr void update_narrow_by_thread(const Step& step, Scale scale, const Arrays& arrays,
                                       int64_t index) {
  const int64_t begin = index * narrow_elements<Arrays>(kCount);
  if constexpr (std::is_same_v<typename Arrays::State, CodedStates>) {
    const int64_t rest = arrays.numel - begin;
    if (rest >= kCodedGroup) {
      update_group<kCount>(step, scale, arrays, begin, kCodedGroup);
    } else if (rest > 0) {
      update_group<1>(step, scale, arrays, begin, rest);
    }
  } else if (begin + kCount <= arrays.numel) {
    update_narrow_pack<kCount>(step, scale, arrays, begin);
  } else {
    for (int64_t i = begin; i < arrays.numel; ++i) update_narrow_pack<1>(step, scale, arrays, i);
  }
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

/// Calls f(step) with the numbers and the formula of an optimizer, which must be element-wise, or
/// Muon, whose sweep the moment says.
template <class F>
void with_step(const Optimizer& optimizer, Moment moment, const F& f) {
  std::visit(
      [&](const auto& known) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(known)>, Muon>) {
          ensure(moment.sweep != Sweep::whole, "Muon's update takes two sweeps");
          if (moment.sweep == Sweep::first) return f(MuonDirection<float>(known, moment));
          f(MatrixStep<float>(known, moment));
        } else if constexpr (requires { step_of(known, moment); }) {
          f(step_of(known, moment));
        } else {
          ensure(false, "a device's kernels are of element-wise optimizers and of Muon");
        }
      },
      optimizer);
}

/// Calls f(gradient, parameter) with the types of the operands' arrays.
template <class F>
void with_types(const Operands& operands, const F& f) {
  with_numbers(operands.gradient_dtype, [&](auto gradient) {
    if (operands.lower != nullptr) return f(gradient, UpperHalves());
    if (operands.parameter == nullptr) return f(gradient, Absent());
    if (operands.parameter_dtype == c10::ScalarType::BFloat16) return f(gradient, Bf16());
    f(gradient, Fp16());
  });
}

/// Returns the array of the operands' master weights, or of their lower halves.
template <class Arrays>
typename Arrays::Master* master_of(const Operands& operands) {
  if constexpr (Arrays::kSplit) {
    return operands.lower;
  } else {
    return operands.master;
  }
}

/// Calls f(width, step, arrays) with the arguments of update_by_thread; `width` is an
/// integral_constant. The master weights of a first sweep are the array that takes the directions,
/// and the gradient of a second sweep is that of directions.
template <class F>
void with_update(const Optimizer& optimizer, Moment moment, const Operands& operands, const F& f) {
  with_step(optimizer, moment, [&](const auto& step) {
    with_states(step, [&](auto states) {
      with_types(operands, [&]<class Gradient, class Parameter>(Gradient, Parameter) {
        using Typed = Arrays<Gradient, Parameter, states.value>;
        const Typed arrays{
            .numel = operands.numel,
            .gradient = static_cast<const typename Gradient::Stored*>(operands.gradient),
            .master = master_of<Typed>(operands),
            .parameter = static_cast<typename Parameter::Stored*>(operands.parameter),
            .state = operands.state};
        if (is_aligned(operands)) return f(std::integral_constant<int, kWidth>(), step, arrays);
        f(std::integral_constant<int, 1>(), step, arrays);
      });
    });
  });
}

/// Returns whether every array of the operands begins where packs of kWidth elements may.
inline bool is_aligned(const NarrowOperands& operands) {
  const auto fits = [](const void* array, size_t bytes) {
    return reinterpret_cast<uintptr_t>(array) % (kWidth * bytes) == 0;
  };
  const size_t bytes = operands.state_format == StateFormat::fp32   ? sizeof(float)
                       : operands.state_format == StateFormat::bf16 ? sizeof(uint16_t)
                                                                    : sizeof(uint8_t);
  return is_aligned(operands.wide) && fits(operands.weights, sizeof(uint16_t)) &&
         fits(operands.state[0], bytes) && fits(operands.state[1], bytes);
}

/// Calls f(width, step, arrays) with the arguments of update_narrow_by_thread, as `with_update`
/// does: once, or twice if the upper halves of the elements' numbers differ. `optimizer` must be
/// element-wise.
template <class F>
void with_narrow_update(const Optimizer& optimizer, Moment moment, const NarrowOperands& operands,
                        const F& f) {
  const auto& wide = operands.wide;
  const auto signs = state_signs(optimizer);
  const auto call = [&]<class Typed>(std::type_identity<Typed>, const auto& step) {
    using State = typename Typed::State;
    constexpr int64_t kSameUpper = int64_t{1} << 32;
    for (int64_t begin = 0; begin < wide.numel;) {
      const int64_t number = operands.first + begin;
      const int64_t room = kSameUpper - number % kSameUpper;
      const int64_t count = room < wide.numel - begin ? room : wide.numel - begin;
      const auto from = [&](auto* array) { return array == nullptr ? nullptr : array + begin; };
      Typed arrays{
          .numel = count,
          .gradient = from(static_cast<const typename Typed::Gradient::Stored*>(wide.gradient)),
          .master = from(master_of<Typed>(wide)),
          .parameter = from(static_cast<typename Typed::Parameter::Stored*>(
              operands.weights != nullptr ? operands.weights : wide.parameter)),
          .state = {},
          .signs = signs,
          .first = static_cast<uint32_t>(number),
          .weights_key = kernels::rounding_key_of(operands.key, 0, number),
          .keys = {}};
      for (size_t s = 0; s < kMostStates; ++s) {
        arrays.keys[s] = kernels::rounding_key_of(operands.key, static_cast<int>(s) + 1, number);
        auto* const bytes = static_cast<std::byte*>(operands.state[s]);
        if (bytes == nullptr) continue;
        arrays.state[s] = reinterpret_cast<typename State::Stored*>(
            bytes + state_bytes(operands.state_format, begin));
      }
      // A part that follows another one may begin at any element.
      if (is_aligned(operands) && begin % kWidth == 0) {
        f(std::integral_constant<int, kWidth>(), step, arrays);
      } else {
        f(std::integral_constant<int, 1>(), step, arrays);
      }
      begin += count;
    }
  };
  const auto with_arrays = [&](const auto& step, auto states) {
    const auto with_formats = [&]<class Gradient, class Parameter>(Gradient, Parameter) {
      const auto typed = [&]<class State>(State) {
        call(std::type_identity<NarrowArrays<Gradient, Parameter, State, states.value>>(), step);
      };
      if constexpr (states.value > 0) {
        if (operands.state_format == StateFormat::bf16) return typed(Bf16States());
        if (operands.state_format == StateFormat::eight_bit) return typed(CodedStates());
      }
      if constexpr (std::is_same_v<Parameter, OwnMaster>) return typed(WideStates());
      ensure(false, "an update of fp32 weights and states is not narrow");
    };
    if (operands.weights == nullptr) return with_types(wide, with_formats);
    with_numbers(wide.gradient_dtype, [&](auto gradient) { with_formats(gradient, OwnMaster()); });
  };
  std::visit(
      [&](const auto& known) {
        if constexpr (requires { step_of(known, moment); }) {
          const auto step = step_of(known, moment);
          with_states(step, [&](auto states) { with_arrays(step, states); });
        } else {
          ensure(false, "a narrow update is of an element-wise optimizer");
        }
      },
      optimizer);
}

}  // namespace zero::optim::device
