// Gates of feed-forward layers (swiglu.h) as a device's threads compute them: Note [Kernels in
// plain C++] in zero/optim/device_elements.h. A gate is rounded before it multiplies, as in
// swiglu.cpp.
#pragma once

#include "zero/models/layers/gelu_elements.h"
#include "zero/models/layers/packs.h"

namespace zero::gate_elements {

template <class Numbers, int kCount>
using Stored = packs::Pack<typename Numbers::Stored, kCount>;

/// A number behind the gate, and the derivative there.
struct Activated {
  float value, slope;
};

/// x times the logistic function of x, or of GELU's argument.
template <class Math>
constexpr Activated activated(float x, bool gelu) {
  if (gelu) {
    const auto [value, slope] = gelu_elements::logistic<Math>(x);
    return {x * value, value + x * value * (1.0F - value) * slope};
  }
  constexpr float kLog2OfE = 1.44269504088896340736F;
  const float value = 1.0F / (1.0F + Math::exp2(-x * kLog2OfE));
  return {x * value, value * (1.0F + x * (1.0F - value))};
}

template <class Math, class Numbers, int kCount>
constexpr Stored<Numbers, kCount> values(const Stored<Numbers, kCount>& gate,
                                         const Stored<Numbers, kCount>& up, bool gelu) {
  Stored<Numbers, kCount> y{};
  for (int i = 0; i < kCount; ++i) {
    const float value = activated<Math>(Numbers::widen(gate.values[i]), gelu).value;
    y.values[i] =
        Numbers::narrow(Numbers::widen(Numbers::narrow(value)) * Numbers::widen(up.values[i]));
  }
  return y;
}

template <class Numbers, int kCount>
struct Gradients {
  Stored<Numbers, kCount> gate, up;
};
template <class Math, class Numbers, int kCount>
constexpr Gradients<Numbers, kCount> backward(const Stored<Numbers, kCount>& stored_dy,
                                              const Stored<Numbers, kCount>& gate,
                                              const Stored<Numbers, kCount>& up, bool gelu) {
  Gradients<Numbers, kCount> result{};
  for (int i = 0; i < kCount; ++i) {
    const float dy = Numbers::widen(stored_dy.values[i]);
    const auto [value, slope] = activated<Math>(Numbers::widen(gate.values[i]), gelu);
    result.gate.values[i] = Numbers::narrow(dy * Numbers::widen(up.values[i]) * slope);
    result.up.values[i] = Numbers::narrow(dy * Numbers::widen(Numbers::narrow(value)));
  }
  return result;
}

}  // namespace zero::gate_elements
