// The optimizers in plain loops, one element at a time: what the vector kernels are tested against,
// in bits. See Note [Same bits everywhere] in kernels.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "zero/base/error.h"
#include "zero/optim/halves.h"
#include "zero/optim/kernels.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/scalars.h"

namespace zero::optim {
namespace {

float element(const void* values, c10::ScalarType dtype, int64_t i) {
  if (dtype == c10::ScalarType::Float) return static_cast<const float*>(values)[i];
  if (dtype == c10::ScalarType::BFloat16) return static_cast<const c10::BFloat16*>(values)[i];
  return static_cast<const c10::Half*>(values)[i];
}

float weight(const Range& range, int64_t i) {
  if (!range.lower) return range.master[i];
  return join({static_cast<const uint16_t*>(range.parameter)[i], range.lower[i]});
}

void set_weight(const Range& range, int64_t i, float value) {
  if (range.lower) {
    const auto halves = split(value);
    static_cast<uint16_t*>(range.parameter)[i] = halves.upper;
    range.lower[i] = halves.lower;
    return;
  }
  range.master[i] = value;
  if (!range.parameter) return;
  if (range.parameter_dtype == c10::ScalarType::BFloat16) {
    static_cast<c10::BFloat16*>(range.parameter)[i] = value;
  } else {
    static_cast<c10::Half*>(range.parameter)[i] = value;
  }
}

void run(const AdamW& optimizer, int64_t step, double lr, double gradient_scale,
         const Range& range) {
  const auto s = scalars(optimizer, step, lr, gradient_scale);
  for (int64_t i = 0; i < range.numel; ++i) {
    float p = weight(range, i);
    float& m = range.state[0][i];
    float& v = range.state[1][i];
    float g = element(range.gradient, range.gradient_dtype, i) * s.gradient_scale;
    if (s.l2 != 0) g += s.l2 * p;
    m = s.beta1 * m + s.one_minus_beta1 * g;
    v = s.beta2 * v + s.one_minus_beta2 * g * g;
    p *= s.decay;
    p += s.negative_step_size * m / (std::sqrt(v) * s.inverse_root_correction2 + s.eps);
    set_weight(range, i, p);
  }
}

void run(const Sgd& optimizer, int64_t step, double lr, double gradient_scale, const Range& range) {
  const auto s = scalars(optimizer, step, lr, gradient_scale);
  for (int64_t i = 0; i < range.numel; ++i) {
    float p = weight(range, i);
    float g = element(range.gradient, range.gradient_dtype, i) * s.gradient_scale;
    if (s.l2 != 0) g += s.l2 * p;
    if (range.state[0]) {
      float& buffer = range.state[0][i];
      buffer = s.first ? g : s.momentum * buffer + s.one_minus_dampening * g;
      g = s.nesterov ? g + s.momentum * buffer : buffer;
    }
    p += s.negative_lr * g;
    set_weight(range, i, p);
  }
}

}  // namespace

void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const Range& range) {
  std::visit([&](const auto& o) { run(o, step, lr, gradient_scale, range); }, optimizer);
}

SquaredNorm squared_norm_reference(const void* values, c10::ScalarType dtype, int64_t numel) {
  SquaredNorm norm;
  for (int64_t begin = 0; begin < numel; begin += kernels::kNormBlock) {
    const int64_t end = std::min(begin + kernels::kNormBlock, numel);
    std::array<double, kernels::kNormLanes> partial{};
    for (int64_t i = begin; i < end; ++i) {
      const float value = element(values, dtype, i);
      norm.finite = norm.finite && std::isfinite(value);
      partial[static_cast<size_t>((i - begin) % kernels::kNormLanes)] +=
          static_cast<double>(value) * static_cast<double>(value);
    }
    double sum = 0;
    for (const double p : partial) sum += p;
    norm.sum += sum;
  }
  return norm;
}

void accumulate_reference(float* destination, const void* source, c10::ScalarType source_dtype,
                          int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) destination[i] += element(source, source_dtype, i);
}

}  // namespace zero::optim
