// Layer norm as a device's threads compute it: Note [Kernels in plain C++] in
// zero/optim/device_elements.h.
//
// In forward a warp has a row, and each lane keeps its packs of the row. So the mean is known
// before the sum of squares around it is taken. The sum that ends a residual branch is made there
// where the norm follows it, and is written for what comes later.
//
// In backward, a row of C numbers has n = (x - mean) rstd and g = dy weight (Ba, Kiros and Hinton,
// arXiv 1607.06450), and the gradients are
//   dx = rstd (g - mean(g) - n mean(g n))
//   dweight = sum over rows of dy n
//   dbias = sum over rows of dy
// A thread has the same columns of all rows that its block visits. It adds up its columns of
// dweight and dbias, which become a part of column_sums_elements.h.
#pragma once

#include <cstdint>

#include "zero/models/layers/packs.h"

namespace zero::layer_norm_elements {

template <int kCount>
constexpr float sum_of(const packs::Pack<float, kCount>& x) {
  float sum = 0;
  for (int i = 0; i < kCount; ++i) sum += x.values[i];
  return sum;
}

/// Returns the sum of (x - mean)^2.
template <int kCount>
constexpr float squares_of(const packs::Pack<float, kCount>& x, float mean) {
  float sum = 0;
  for (int i = 0; i < kCount; ++i) sum += (x.values[i] - mean) * (x.values[i] - mean);
  return sum;
}

/// Returns the sum that ends a residual branch, of whose rounded numbers the norm is then taken.
template <class Numbers, int kCount>
constexpr packs::Pack<typename Numbers::Stored, kCount> added(
    const packs::Pack<typename Numbers::Stored, kCount>& branch,
    const packs::Pack<typename Numbers::Stored, kCount>& x) {
  packs::Pack<typename Numbers::Stored, kCount> sum{};
  for (int i = 0; i < kCount; ++i)
    sum.values[i] = Numbers::narrow(Numbers::widen(branch.values[i]) + Numbers::widen(x.values[i]));
  return sum;
}

template <class Numbers, int kCount>
constexpr packs::Pack<typename Numbers::Stored, kCount> y_of(
    const packs::Pack<float, kCount>& x, float mean, float rstd,
    const packs::Pack<float, kCount>& weight, const packs::Pack<float, kCount>& bias) {
  packs::Pack<typename Numbers::Stored, kCount> y{};
  for (int i = 0; i < kCount; ++i)
    y.values[i] = Numbers::narrow((x.values[i] - mean) * rstd * weight.values[i] + bias.values[i]);
  return y;
}

/// A thread's columns of a row.
template <class Numbers, int kCount>
struct Share {
  packs::Pack<typename Numbers::Stored, kCount> dy, x;
  float mean, rstd;
};

/// A row's dx needs these sums over all of its columns, of g and of g n.
struct Sums {
  float plain = 0, normed = 0;
};
constexpr Sums join(Sums a, Sums b) { return {a.plain + b.plain, a.normed + b.normed}; }

template <int kCount>
struct Gradients {
  packs::Pack<float, kCount> weight, bias;
};

/// Returns the sums of a share, and adds its part of the gradients of weight and bias to theirs.
template <class Numbers, int kCount>
constexpr Sums add(const Share<Numbers, kCount>& share, const packs::Pack<float, kCount>& weight,
                   Gradients<kCount>& gradients) {
  const auto dy = packs::widened<Numbers, kCount>(share.dy);
  const auto x = packs::widened<Numbers, kCount>(share.x);
  Sums sums;
  for (int i = 0; i < kCount; ++i) {
    const float normed = (x.values[i] - share.mean) * share.rstd;
    const float g = dy.values[i] * weight.values[i];
    sums.plain += g;
    sums.normed += g * normed;
    gradients.weight.values[i] += dy.values[i] * normed;
    gradients.bias.values[i] += dy.values[i];
  }
  return sums;
}

/// Returns dx of a share, to which `more` is added: the gradients that x has by other ways. `row`
/// has the sums of its whole row of `columns` numbers.
template <class Numbers, int kCount>
constexpr packs::Pack<typename Numbers::Stored, kCount> dx_of(
    const Share<Numbers, kCount>& share, const packs::Pack<float, kCount>& weight, Sums row,
    int64_t columns, const packs::Pack<float, kCount>& more = {}) {
  const auto dy = packs::widened<Numbers, kCount>(share.dy);
  const auto x = packs::widened<Numbers, kCount>(share.x);
  const float one = 1.0F / static_cast<float>(columns);
  const float plain = row.plain * one;
  const float normed_mean = row.normed * one;
  packs::Pack<typename Numbers::Stored, kCount> result{};
  for (int i = 0; i < kCount; ++i) {
    const float normed = (x.values[i] - share.mean) * share.rstd;
    const float g = dy.values[i] * weight.values[i];
    result.values[i] =
        Numbers::narrow((g - plain - normed * normed_mean) * share.rstd + more.values[i]);
  }
  return result;
}

}  // namespace zero::layer_norm_elements
