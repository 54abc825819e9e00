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
#include "zero/optim/narrow_kernel.h"
#include "zero/optim/passes.h"
#include "zero/optim/state_format_kernel.h"

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

void check(const Optimizer& optimizer, const NarrowRange& range) {
  const auto states = state_names(optimizer).size();
  const auto& wide = range.wide;
  ensure(reach(optimizer) == Reach::element, "an update of a narrow range has one pass");
  ensure(wide.numel == 0 ||
             (range.weights != nullptr) == (wide.master == nullptr && wide.lower == nullptr),
         "a range has weights, in bf16 or as wide ones have them");
  for (size_t i = 0; i < kMostStates; ++i)
    ensure((range.state[i] != nullptr) == (i < states), "a range has its optimizer's states");
  ensure(range.state_format != StateFormat::eight_bit || range.first % kCodedBlock == 0,
         "8-bit states are updated from the beginning of a block on");
}

template <class T>
T* from(T* array, int64_t begin) {
  return array == nullptr ? nullptr : array + begin;
}

// Returns elements [begin, end) of the range in fp32. Arrays that are narrower are replaced by the
// caller's.
Range widened(const NarrowRange& range, int64_t begin, int64_t end, float* weights,
              const std::array<float*, kMostStates>& state) {
  auto wide = range.wide;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(wide.gradient_dtype));
  wide.numel = end - begin;
  wide.master = range.weights != nullptr ? weights : from(wide.master, begin);
  wide.lower = from(wide.lower, begin);
  wide.parameter = from(static_cast<uint16_t*>(wide.parameter), begin);
  wide.gradient = static_cast<const std::byte*>(wide.gradient) + begin * element_bytes;
  wide.state = state;
  return wide;
}

// Returns the address of a state from element `begin` on, or null if there is no such state.
std::byte* state_at(const NarrowRange& range, size_t state, int64_t begin) {
  return from(static_cast<std::byte*>(range.state[state]), state_bytes(range.state_format, begin));
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
            const NarrowRange& range) {
  check(optimizer, range);
  const auto format = range.state_format;
  const auto signs = state_signs(optimizer);
  const auto pass = [&](int64_t begin, int64_t end) {
    alignas(64) std::array<float, kNarrowBlock> weights;
    alignas(64) std::array<std::array<float, kNarrowBlock>, kMostStates> scratch;
    if (range.weights != nullptr)
      kernels::widen(range.weights + begin, weights.data(), end - begin);
    std::array<float*, kMostStates> state{};
    for (size_t i = 0; i < kMostStates; ++i) {
      auto* kept = state_at(range, i, begin);
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
    update(optimizer, step, lr, gradient_scale, widened(range, begin, end, weights.data(), state));
    const int64_t first = range.first + begin;
    const auto index = static_cast<uint32_t>(first);
    if (range.weights != nullptr) {
      kernels::round_stochastic(weights.data(), range.weights + begin, end - begin,
                                kernels::rounding_key_of(range.key, kWeights, first), index);
    }
    for (size_t i = 0; i < kMostStates; ++i) {
      auto* kept = state_at(range, i, begin);
      if (kept == nullptr || format == StateFormat::fp32) continue;
      const auto key = kernels::rounding_key_of(range.key, array_of(i), first);
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
  parallel_for(0, at::ceil_div(range.wide.numel, kNarrowBlock), kNarrowGrain,
               [&](int64_t from, int64_t to) {
                 const int64_t last = std::min(to * kNarrowBlock, range.wide.numel);
                 for (int64_t begin = from * kNarrowBlock; begin < last;) {
                   const int64_t room = kSameUpper - (range.first + begin) % kSameUpper;
                   const int64_t end = std::min({begin + kNarrowBlock, last, begin + room});
                   pass(begin, end);
                   begin = end;
                 }
               });
}

void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const NarrowRange& range) {
  const int64_t count = range.wide.numel;
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
      to[i] = round_stochastic(values[i], range.key, array, range.first + static_cast<int64_t>(i));
  };
  std::vector<float> weights;
  if (range.weights != nullptr) weights = wide(range.weights);
  std::array<std::vector<float>, kMostStates> scratch;
  std::array<float*, kMostStates> state{};
  for (size_t i = 0; i < kMostStates; ++i) {
    if (range.state[i] == nullptr) continue;
    if (range.state_format == StateFormat::fp32) {
      state[i] = static_cast<float*>(range.state[i]);
      continue;
    }
    if (range.state_format == StateFormat::bf16) {
      scratch[i] = wide(static_cast<uint16_t*>(range.state[i]));
    } else {
      scratch[i].resize(numel);
      decode_reference(static_cast<std::byte*>(range.state[i]), scratch[i].data(), count, signs[i]);
    }
    state[i] = scratch[i].data();
  }
  update_reference(optimizer, step, lr, gradient_scale,
                   widened(range, 0, count, weights.data(), state));
  if (range.weights != nullptr) narrow(weights, range.weights, kWeights);
  for (size_t i = 0; i < kMostStates; ++i) {
    if (range.state[i] == nullptr || range.state_format == StateFormat::fp32) continue;
    if (range.state_format == StateFormat::bf16) {
      narrow(scratch[i], static_cast<uint16_t*>(range.state[i]), array_of(i));
    } else {
      encode_reference(scratch[i].data(), static_cast<std::byte*>(range.state[i]), count, signs[i],
                       range.key, array_of(i), range.first);
    }
  }
}

}  // namespace zero::optim
