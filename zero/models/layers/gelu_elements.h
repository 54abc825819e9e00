// GELU and its derivative as a device's threads compute them: Note [Kernels in plain C++] in
// zero/optim/device_elements.h. The formulas are those of gelu.h: x times the logistic function.
#pragma once

#include <cstdint>

#include "zero/models/layers/packs.h"

namespace zero::gelu_elements {

/// The logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3), and that argument's derivative.
struct Logistic {
  float value, slope;
};
template <class Math>
constexpr Logistic logistic(float x) {
  constexpr float kFactor = 1.5957691216057308F;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.044715F;
  constexpr float kLog2OfE = 1.44269504088896340736F;
  const float square = x * x;
  const float argument = kFactor * x * (1.0F + kCubic * square);
  return {1.0F / (1.0F + Math::exp2(-argument * kLog2OfE)),
          kFactor * (1.0F + 3.0F * kCubic * square)};
}

template <class Numbers, int kCount>
using Stored = packs::Pack<typename Numbers::Stored, kCount>;

/// Computes y = gelu(x).
template <class Math, class Numbers, int kCount>
constexpr Stored<Numbers, kCount> values(const Stored<Numbers, kCount>& stored) {
  const auto x = packs::widened<Numbers, kCount>(stored);
  Stored<Numbers, kCount> y{};
  for (int i = 0; i < kCount; ++i)
    y.values[i] = Numbers::narrow(x.values[i] * logistic<Math>(x.values[i]).value);
  return y;
}

/// Computes dx = dy gelu'(x), and y = gelu(x) once more.
template <class Numbers, int kCount>
struct Backward {
  Stored<Numbers, kCount> dx, y;
};
template <class Math, class Numbers, int kCount>
constexpr Backward<Numbers, kCount> backward(const Stored<Numbers, kCount>& stored,
                                             const Stored<Numbers, kCount>& stored_dy) {
  const auto x = packs::widened<Numbers, kCount>(stored);
  const auto dy = packs::widened<Numbers, kCount>(stored_dy);
  Backward<Numbers, kCount> result{};
  for (int i = 0; i < kCount; ++i) {
    const auto [value, slope] = logistic<Math>(x.values[i]);
    const float y = x.values[i] * value;
    result.y.values[i] = Numbers::narrow(y);
    result.dx.values[i] = Numbers::narrow(dy.values[i] * (value + y * (1.0F - value) * slope));
  }
  return result;
}

}  // namespace zero::gelu_elements
