// Plain loops, one element at a time. Tests compare the vector kernels with them in bits. See Note
// [Same bits everywhere] in kernels.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "zero/base/error.h"
#include "zero/optim/algorithm.h"
#include "zero/optim/halves.h"
#include "zero/optim/kernels.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {
namespace {

float element(const void* values, c10::ScalarType dtype, int64_t i) {
  if (dtype == c10::ScalarType::Float) return static_cast<const float*>(values)[i];
  if (dtype == c10::ScalarType::BFloat16) return static_cast<const c10::BFloat16*>(values)[i];
  return static_cast<const c10::Half*>(values)[i];
}

}  // namespace

float weight_at(const Operands& operands, int64_t i) {
  if (!operands.lower) return operands.master[i];
  return join({static_cast<const uint16_t*>(operands.parameter)[i], operands.lower[i]});
}

float gradient_at(const Operands& operands, int64_t i, float scale) {
  if (!operands.gradient) return 0;
  const float scaled = element(operands.gradient, operands.gradient_dtype, i) * scale;
  if (scaled > operands.gradient_limit) return operands.gradient_limit;
  return scaled < -operands.gradient_limit ? -operands.gradient_limit : scaled;
}

void set_weight_at(const Operands& operands, int64_t i, float value) {
  if (operands.lower) {
    const auto halves = split(value);
    static_cast<uint16_t*>(operands.parameter)[i] = halves.upper;
    operands.lower[i] = halves.lower;
    return;
  }
  operands.master[i] = value;
  if (!operands.parameter) return;
  if (operands.parameter_dtype == c10::ScalarType::BFloat16) {
    static_cast<c10::BFloat16*>(operands.parameter)[i] = value;
  } else {
    static_cast<c10::Half*>(operands.parameter)[i] = value;
  }
}

double sum_of_squares(const std::array<float, ExactSum::kBlock>& values) {
  std::array<double, 8> s{};
  for (size_t i = 0; i < values.size(); ++i) s[i % 8] += double{values[i]} * double{values[i]};
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
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
