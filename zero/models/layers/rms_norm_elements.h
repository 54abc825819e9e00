// RMS norm as a device's threads compute it: Note [Kernels in plain C++] in
// zero/optim/device_elements.h.
//
// A thread has the same packs of columns of all rows that its block visits. A row of C numbers has
// r = 1 / sqrt(mean(x^2) + eps), n = x r and, with g = dy w (w is the weight, or 1 + weight:
// NormScale in rms_norm.h), the gradients are
//   dx = r (g - n mean(g n))
//   dweight = sum over rows of dy n
// A norm's numbers are rounded where rms_norm.cpp rounds them, but for products of two.
#pragma once

#include <cstdint>

#include "zero/models/layers/packs.h"

namespace zero::rms_norm_elements {

template <class Numbers, int kCount>
using Stored = packs::Pack<typename Numbers::Stored, kCount>;

/// Returns the sum of squares.
template <int kCount>
constexpr float squares_of(const packs::Pack<float, kCount>& x) {
  float sum = 0;
  for (int i = 0; i < kCount; ++i) sum += x.values[i] * x.values[i];
  return sum;
}

/// Returns x r, rounded to the numbers' format unless the weight is taken with one.
template <class Numbers>
constexpr float normed(float x, float root, bool and_one) {
  const float quotient = x * root;
  return and_one ? quotient : Numbers::widen(Numbers::narrow(quotient));
}

template <class Numbers, int kCount>
constexpr Stored<Numbers, kCount> y_of(const packs::Pack<float, kCount>& x, float root,
                                       const packs::Pack<float, kCount>& weight, bool and_one) {
  Stored<Numbers, kCount> y{};
  for (int i = 0; i < kCount; ++i) {
    const float factor = and_one ? weight.values[i] + 1.0F : weight.values[i];
    y.values[i] = Numbers::narrow(normed<Numbers>(x.values[i], root, and_one) * factor);
  }
  return y;
}

/// Returns the share of the sum of g n, and adds to `gradients` those of the weight.
template <class Numbers, int kCount>
constexpr float add(const packs::Pack<float, kCount>& dy, const packs::Pack<float, kCount>& x,
                    float root, const packs::Pack<float, kCount>& weight, bool and_one,
                    packs::Pack<float, kCount>& gradients) {
  float sum = 0;
  for (int i = 0; i < kCount; ++i) {
    const float factor = and_one ? weight.values[i] + 1.0F : weight.values[i];
    sum += dy.values[i] * factor * (x.values[i] * root);
    gradients.values[i] += dy.values[i] * normed<Numbers>(x.values[i], root, and_one);
  }
  return sum;
}

/// Returns dx, to which `more` is added: the gradients that x has by other ways. `sum` is that of
/// g n over a whole row of `columns` numbers.
template <class Numbers, int kCount>
constexpr Stored<Numbers, kCount> dx_of(const packs::Pack<float, kCount>& dy,
                                        const packs::Pack<float, kCount>& x, float root,
                                        const packs::Pack<float, kCount>& weight, bool and_one,
                                        float sum, int64_t columns,
                                        const packs::Pack<float, kCount>& more) {
  const float mean = sum / static_cast<float>(columns);
  Stored<Numbers, kCount> dx{};
  for (int i = 0; i < kCount; ++i) {
    const float factor = and_one ? weight.values[i] + 1.0F : weight.values[i];
    const float inner = dy.values[i] * factor - x.values[i] * root * mean;
    dx.values[i] = Numbers::narrow(root * inner + more.values[i]);
  }
  return dx;
}

}  // namespace zero::rms_norm_elements
