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

namespace zero::optim {

namespace {

// Elements that are widened at a time: they stay in a core's first cache.
constexpr int64_t kBlock = 2048;
constexpr int64_t kGrain = 8;
constexpr int kWeights = 0;

// The mixing of splitmix64.
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

void check(const Optimizer& optimizer, const NarrowRange& range) {
  const auto states = state_names(optimizer).size();
  ensure(reach(optimizer) == Reach::element, "an update of a range in bf16 has one pass");
  ensure(range.numel >= 0 && (range.numel == 0 || range.weights != nullptr),
         "a range in bf16 has weights");
  for (size_t i = 0; i < range.state.size(); ++i)
    ensure((range.state[i] != nullptr) == (i < states), "a range has its optimizer's states");
}

// Elements [begin, end) of the range, in fp32 arrays that are the caller's.
Range widened(const NarrowRange& range, int64_t begin, int64_t end, float* weights,
              const std::array<float*, 2>& state) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(range.gradient_dtype));
  Range wide{.numel = end - begin,
             .gradient = static_cast<const std::byte*>(range.gradient) + begin * element_bytes,
             .gradient_dtype = range.gradient_dtype,
             .gradient_limit = range.gradient_limit};
  wide.master = weights;
  for (size_t i = 0; i < state.size(); ++i) wide.state[i] = state[i];
  return wide;
}

// Where the states of elements from `begin` on are, if they are fp32.
float* in_place(const NarrowRange& range, size_t state, int64_t begin) {
  auto* values = range.state[state];
  const bool is_fp32 = range.state_dtype == c10::ScalarType::Float;
  return values != nullptr && is_fp32 ? static_cast<float*>(values) + begin : nullptr;
}

uint16_t* narrow_at(const NarrowRange& range, size_t state, int64_t begin) {
  auto* values = range.state[state];
  const bool is_fp32 = range.state_dtype == c10::ScalarType::Float;
  return values == nullptr || is_fp32 ? nullptr : static_cast<uint16_t*>(values) + begin;
}

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
  const auto pass = [&](int64_t begin, int64_t end) {
    alignas(64) std::array<float, kBlock> weights;
    alignas(64) std::array<std::array<float, kBlock>, 2> scratch;
    kernels::widen(range.weights + begin, weights.data(), end - begin);
    std::array<float*, 2> state{};
    for (size_t i = 0; i < state.size(); ++i) {
      state[i] = in_place(range, i, begin);
      const auto* narrow = narrow_at(range, i, begin);
      if (narrow == nullptr) continue;
      state[i] = scratch[i].data();
      kernels::widen(narrow, state[i], end - begin);
    }
    update(optimizer, step, lr, gradient_scale, widened(range, begin, end, weights.data(), state));
    const int64_t first = range.first + begin;
    const auto narrow = [&](const float* from, uint16_t* to, int array) {
      kernels::round_stochastic(from, to, end - begin,
                                kernels::rounding_key_of(range.key, array, first),
                                static_cast<uint32_t>(first));
    };
    narrow(weights.data(), range.weights + begin, kWeights);
    for (size_t i = 0; i < state.size(); ++i) {
      auto* to = narrow_at(range, i, begin);
      if (to != nullptr) narrow(state[i], to, static_cast<int>(i) + 1);
    }
  };
  // Elements of a block have numbers with the same upper half.
  constexpr int64_t kSameUpper = int64_t{1} << 32;
  parallel_for(0, at::ceil_div(range.numel, kBlock), kGrain, [&](int64_t from, int64_t to) {
    const int64_t last = std::min(to * kBlock, range.numel);
    for (int64_t begin = from * kBlock; begin < last;) {
      const int64_t room = kSameUpper - (range.first + begin) % kSameUpper;
      const int64_t end = std::min({begin + kBlock, last, begin + room});
      pass(begin, end);
      begin = end;
    }
  });
}

void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const NarrowRange& range) {
  const auto numel = static_cast<size_t>(range.numel);
  const auto wide = [&](const uint16_t* values) {
    std::vector<float> result(numel);
    for (size_t i = 0; i < numel; ++i)
      result[i] = c10::BFloat16(values[i], c10::BFloat16::from_bits());
    return result;
  };
  auto weights = wide(range.weights);
  std::array<std::vector<float>, 2> scratch;
  std::array<float*, 2> state{};
  for (size_t i = 0; i < state.size(); ++i) {
    state[i] = in_place(range, i, 0);
    const auto* narrow = narrow_at(range, i, 0);
    if (narrow == nullptr) continue;
    scratch[i] = wide(narrow);
    state[i] = scratch[i].data();
  }
  update_reference(optimizer, step, lr, gradient_scale,
                   widened(range, 0, range.numel, weights.data(), state));
  for (size_t i = 0; i < numel; ++i) {
    const auto index = range.first + static_cast<int64_t>(i);
    range.weights[i] = round_stochastic(weights[i], range.key, kWeights, index);
    for (size_t j = 0; j < state.size(); ++j) {
      if (auto* to = narrow_at(range, j, 0); to != nullptr)
        to[i] = round_stochastic(state[j][i], range.key, static_cast<int>(j) + 1, index);
    }
  }
}

}  // namespace zero::optim
