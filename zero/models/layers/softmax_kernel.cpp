#include "zero/models/layers/softmax_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/models/layers/softmax_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// These come after highway.h, once for each target.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace zero {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

double Sum(const float* HWY_RESTRICT values, int64_t numel) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = numel - numel % lanes;
  auto sums = hn::Zero(d);
  for (int64_t i = 0; i < whole; i += lanes) sums = hn::Add(sums, hn::LoadU(d, values + i));
  double sum = hn::GetLane(hn::SumOfLanes(d, sums));
  for (int64_t i = whole; i < numel; ++i) sum += values[i];
  return sum;
}

// A row of a vocabulary fits a core's second-level cache, so its three visits cost one trip to
// memory.
double SoftmaxRow(float* HWY_RESTRICT logits, int64_t vocabulary, int64_t target, float scale,
                  bool gradient, double smoothing) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = vocabulary - vocabulary % lanes;

  auto largest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto not_a_number = hn::IsNaN(largest);  // of no lane
  for (int64_t i = 0; i < whole; i += lanes) {
    const auto x = hn::LoadU(d, logits + i);
    not_a_number = hn::Or(not_a_number, hn::IsNaN(x));
    largest = hn::Max(largest, x);
  }
  float max = hn::GetLane(hn::MaxOfLanes(d, largest));
  // The vector Max and Exp may lose a NaN, so it is looked for.
  bool usable = hn::AllFalse(d, not_a_number);
  for (int64_t i = whole; i < vocabulary; ++i) {
    usable = usable && !std::isnan(logits[i]);
    max = std::max(max, logits[i]);
  }
  if (!usable || std::isinf(max)) {
    if (gradient) std::fill_n(logits, vocabulary, std::numeric_limits<float>::quiet_NaN());
    return std::numeric_limits<double>::quiet_NaN();
  }

  // The logits' mean under the wanted probabilities.
  double wanted = logits[target];
  if (smoothing > 0) {
    wanted += smoothing * (Sum(logits, vocabulary) / static_cast<double>(vocabulary) - wanted);
  }
  const auto shift = hn::Set(d, max);
  auto sum_lanes = hn::Zero(d);
  for (int64_t i = 0; i < whole; i += lanes) {
    const auto e = hn::Exp(d, hn::Sub(hn::LoadU(d, logits + i), shift));
    sum_lanes = hn::Add(sum_lanes, e);
    if (gradient) hn::StoreU(e, d, logits + i);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, sum_lanes));
  for (int64_t i = whole; i < vocabulary; ++i) {
    const float e = std::exp(logits[i] - max);
    sum += e;
    if (gradient) logits[i] = e;
  }

  if (gradient) {
    const float factor = scale / sum;
    const auto factors = hn::Set(d, factor);
    // -0 changes no number that it is added to.
    const auto rest = static_cast<float>(-smoothing / static_cast<double>(vocabulary)) * scale;
    const auto rests = hn::Set(d, rest);
    for (int64_t i = 0; i < whole; i += lanes) {
      hn::StoreU(hn::MulAdd(hn::LoadU(d, logits + i), factors, rests), d, logits + i);
    }
    for (int64_t i = whole; i < vocabulary; ++i) logits[i] = logits[i] * factor + rest;
    logits[target] -= static_cast<float>(1 - smoothing) * scale;
  }
  return std::log(static_cast<double>(sum)) + max - wanted;
}

}  // namespace HWY_NAMESPACE
}  // namespace zero
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

HWY_EXPORT(SoftmaxRow);

double softmax_row(float* logits, int64_t vocabulary, int64_t target, float scale, bool gradient,
                   double smoothing) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxRow)(logits, vocabulary, target, scale, gradient, smoothing);
}

}  // namespace zero
#endif
