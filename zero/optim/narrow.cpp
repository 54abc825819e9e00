#include "zero/optim/narrow.h"

#include <ATen/ceil_div.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/device/stream.h"
#include "zero/optim/narrow_kernel.h"
#include "zero/optim/operators.h"
#include "zero/optim/state_format_kernel.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {

namespace {

// Elements that are widened at a time. They stay in a core's first cache.
constexpr int64_t kNarrowBlock = 2048;
constexpr int64_t kNarrowGrain = 8;
constexpr int kWeights = 0;

// Mixes bits as splitmix64 does.
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

void check(const Optimizer& optimizer, const NarrowOperands& operands) {
  const auto states = state_names(optimizer).size();
  const auto& wide = operands.wide;
  ensure(reach(optimizer) == Reach::element, "an update of narrow operands has one sweep");
  ensure(wide.numel == 0 ||
             (operands.weights != nullptr) == (wide.master == nullptr && wide.lower == nullptr),
         "operands have weights, in bf16 or as wide ones have them");
  for (size_t i = 0; i < kMostStates; ++i)
    ensure((operands.state[i] != nullptr) == (i < states),
           "operands have their optimizer's states");
  ensure(operands.state_format != StateFormat::eight_bit || operands.first % kCodedBlock == 0,
         "8-bit states are updated from the beginning of a block on");
}

template <class T>
T* from(T* array, int64_t begin) {
  return array == nullptr ? nullptr : array + begin;
}

// Returns elements [begin, end) of the operands in fp32. Arrays that are narrower are replaced by
// the caller's.
Operands widened(const NarrowOperands& operands, int64_t begin, int64_t end, float* weights,
                 const std::array<float*, kMostStates>& state) {
  auto wide = operands.wide;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(wide.gradient_dtype));
  wide.numel = end - begin;
  wide.master = operands.weights != nullptr ? weights : from(wide.master, begin);
  wide.lower = from(wide.lower, begin);
  wide.parameter = from(static_cast<uint16_t*>(wide.parameter), begin);
  wide.gradient = static_cast<const std::byte*>(wide.gradient) + begin * element_bytes;
  wide.state = state;
  return wide;
}

// Returns the address of a state from element `begin` on, or null if there is no such state.
std::byte* state_at(const NarrowOperands& operands, size_t state, int64_t begin) {
  return from(static_cast<std::byte*>(operands.state[state]),
              state_bytes(operands.state_format, begin));
}

int array_of(size_t state) { return static_cast<int>(state) + 1; }

}  // namespace

kernels::RoundingKey kernels::rounding_key_of(uint64_t key, int array, int64_t index) {
  const auto upper = static_cast<uint64_t>(index) >> 32;
  const auto bits = spread(key ^ spread(upper * 8 + static_cast<uint64_t>(array)));
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

uint64_t rounding_key(int64_t unit, int64_t step) {
  return spread(spread(static_cast<uint64_t>(unit)) ^ static_cast<uint64_t>(step));
}

uint16_t round_stochastic(float value, uint64_t key, int array, int64_t index) {
  if (std::isnan(value)) return 0x7FC0;
  const auto random = kernels::random_bits(kernels::rounding_key_of(key, array, index),
                                           static_cast<uint32_t>(index));
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + (random >> 16)) >> 16);
}

void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const NarrowOperands& operands) {
  check(optimizer, operands);
  if (is_asynchronous(operands.wide.device)) {
    enqueue_update(optimizer, {step, lr}, gradient_scale, operands);
    return;
  }
  const auto format = operands.state_format;
  const auto signs = state_signs(optimizer);
  const auto sweep = [&](int64_t begin, int64_t end) {
    alignas(64) std::array<float, kNarrowBlock> weights;
    alignas(64) std::array<std::array<float, kNarrowBlock>, kMostStates> scratch;
    if (operands.weights != nullptr)
      kernels::widen(operands.weights + begin, weights.data(), end - begin);
    std::array<float*, kMostStates> state{};
    for (size_t i = 0; i < kMostStates; ++i) {
      auto* kept = state_at(operands, i, begin);
      if (kept == nullptr) continue;
      state[i] = scratch[i].data();
      if (format == StateFormat::fp32) {
        state[i] = reinterpret_cast<float*>(kept);
      } else if (format == StateFormat::bf16) {
        kernels::widen(reinterpret_cast<uint16_t*>(kept), state[i], end - begin);
      } else {
        kernels::decode(reinterpret_cast<uint8_t*>(kept), state[i], end - begin, signs[i]);
      }
    }
    update(optimizer, step, lr, gradient_scale,
           widened(operands, begin, end, weights.data(), state));
    const int64_t first = operands.first + begin;
    const auto index = static_cast<uint32_t>(first);
    if (operands.weights != nullptr) {
      kernels::round_stochastic(weights.data(), operands.weights + begin, end - begin,
                                kernels::rounding_key_of(operands.key, kWeights, first), index);
    }
    for (size_t i = 0; i < kMostStates; ++i) {
      auto* kept = state_at(operands, i, begin);
      if (kept == nullptr || format == StateFormat::fp32) continue;
      const auto key = kernels::rounding_key_of(operands.key, array_of(i), first);
      if (format == StateFormat::bf16) {
        kernels::round_stochastic(state[i], reinterpret_cast<uint16_t*>(kept), end - begin, key,
                                  index);
      } else {
        kernels::encode(state[i], reinterpret_cast<uint8_t*>(kept), end - begin, signs[i], &key,
                        index);
      }
    }
  };
  // The elements of a block must have numbers with the same upper half.
  constexpr int64_t kSameUpper = int64_t{1} << 32;
  parallel_for(0, at::ceil_div(operands.wide.numel, kNarrowBlock), kNarrowGrain,
               [&](int64_t from, int64_t to) {
                 const int64_t last = std::min(to * kNarrowBlock, operands.wide.numel);
                 for (int64_t begin = from * kNarrowBlock; begin < last;) {
                   const int64_t room = kSameUpper - (operands.first + begin) % kSameUpper;
                   const int64_t end = std::min({begin + kNarrowBlock, last, begin + room});
                   sweep(begin, end);
                   begin = end;
                 }
               });
}

void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const NarrowOperands& operands) {
  const int64_t count = operands.wide.numel;
  const auto numel = static_cast<size_t>(count);
  const auto signs = state_signs(optimizer);
  const auto wide = [&](const uint16_t* values) {
    std::vector<float> result(numel);
    for (size_t i = 0; i < numel; ++i)
      result[i] = c10::BFloat16(values[i], c10::BFloat16::from_bits());
    return result;
  };
  const auto narrow = [&](const std::vector<float>& values, uint16_t* to, int array) {
    for (size_t i = 0; i < numel; ++i)
      to[i] = round_stochastic(values[i], operands.key, array,
                               operands.first + static_cast<int64_t>(i));
  };
  std::vector<float> weights;
  if (operands.weights != nullptr) weights = wide(operands.weights);
  std::array<std::vector<float>, kMostStates> scratch;
  std::array<float*, kMostStates> state{};
  for (size_t i = 0; i < kMostStates; ++i) {
    if (operands.state[i] == nullptr) continue;
    if (operands.state_format == StateFormat::fp32) {
      state[i] = static_cast<float*>(operands.state[i]);
      continue;
    }
    if (operands.state_format == StateFormat::bf16) {
      scratch[i] = wide(static_cast<uint16_t*>(operands.state[i]));
    } else {
      scratch[i].resize(numel);
      decode_reference(static_cast<std::byte*>(operands.state[i]), scratch[i].data(), count,
                       signs[i]);
    }
    state[i] = scratch[i].data();
  }
  update_reference(optimizer, step, lr, gradient_scale,
                   widened(operands, 0, count, weights.data(), state));
  if (operands.weights != nullptr) narrow(weights, operands.weights, kWeights);
  for (size_t i = 0; i < kMostStates; ++i) {
    if (operands.state[i] == nullptr || operands.state_format == StateFormat::fp32) continue;
    if (operands.state_format == StateFormat::bf16) {
      narrow(scratch[i], static_cast<uint16_t*>(operands.state[i]), array_of(i));
    } else {
      encode_reference(scratch[i].data(), static_cast<std::byte*>(operands.state[i]), count,
                       signs[i], operands.key, array_of(i), operands.first);
    }
  }
}

}  // namespace zero::optim
