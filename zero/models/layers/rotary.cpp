#include "zero/models/layers/rotary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zero {
namespace {

struct Frequencies {
  at::Tensor inverse;   // (D / 2), fp32
  double factor = 1.0;  // on cosines and sines
};

at::Tensor powers(double theta, int64_t dim) {
  const auto exponents = at::arange(0, dim, 2, at::kLong).to(at::kFloat) / dim;
  return at::pow(theta, exponents).reciprocal();
}

at::Tensor llama3_frequencies(const at::Tensor& f, const RotaryOptions& options, double old) {
  const double low = options.low_frequency_factor;
  const double high = options.high_frequency_factor;
  const auto wave = at::reciprocal(f) * (2 * std::numbers::pi);
  const auto share = (at::reciprocal(wave) * old - low) / (high - low);
  const auto between = (1 - share) * f / options.factor + share * f;
  const auto long_ones = at::where(wave > old / low, f / options.factor, f);
  return at::where((wave >= old / high).logical_and(wave <= old / low), between, long_ones);
}

double yarn_scale(double factor, double scale) {
  return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

Frequencies yarn_frequencies(const at::Tensor& f, const RotaryOptions& options, double old,
                             int64_t dim) {
  // The dimension whose angle turns so often over the original context.
  const auto turning = [&](double rotations) {
    return static_cast<double>(dim) * std::log(old / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(options.theta));
  };
  double low = turning(options.beta_fast);
  double high = turning(options.beta_slow);
  if (options.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const auto ramp = ((at::arange(dim / 2, at::kFloat) - low) / (high - low)).clamp(0, 1);
  const bool both = options.mscale != 0 && options.mscale_all_dim != 0;
  const double factor = options.attention_factor.value_or(
      both ? yarn_scale(options.factor, options.mscale) /
                 yarn_scale(options.factor, options.mscale_all_dim)
           : yarn_scale(options.factor, 1));
  return {f / options.factor * ramp + f * (1 - ramp), factor};
}

Frequencies frequencies(const RotaryOptions& options, int64_t dim, int64_t context,
                        int64_t sequence) {
  const auto old =
      static_cast<double>(options.original_context > 0 ? options.original_context : context);
  switch (options.kind) {
    case RotaryKind::standard:
      break;
    case RotaryKind::linear:
      return {powers(options.theta, dim) / options.factor};
    case RotaryKind::dynamic: {
      const double stretch = options.factor * static_cast<double>(std::max(sequence, context)) /
                                 static_cast<double>(context) -
                             (options.factor - 1);
      const auto d = static_cast<double>(dim);
      return {powers(options.theta * std::pow(stretch, d / (d - 2)), dim)};
    }
    case RotaryKind::llama3:
      return {llama3_frequencies(powers(options.theta, dim), options, old)};
    case RotaryKind::yarn:
      return yarn_frequencies(powers(options.theta, dim), options, old, dim);
  }
  return {powers(options.theta, dim)};
}

}  // namespace

RotaryTable rotary_table(const RotaryOptions& options, int64_t head_dim, int64_t context,
                         int64_t sequence, c10::Device device) {
  const auto [inverse, factor] = frequencies(options, head_dim, context, sequence);
  const auto half = at::outer(at::arange(sequence, at::kLong).to(at::kFloat), inverse);
  const auto angles = at::cat({half, half}, -1).unsqueeze(1);
  return {(angles.cos() * factor).to(device), (angles.sin() * factor).to(device)};
}

RotaryTable rows_at(const RotaryTable& table, const at::Tensor& positions) {
  const auto rows = [&](const at::Tensor& of) {
    return of.index_select(0, positions.flatten()).view({positions.size(0), -1, 1, of.size(-1)});
  };
  return {rows(table.cosines), rows(table.sines)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table, at::ScalarType dtype) {
  const auto halves = x.chunk(2, -1);
  const auto turned = at::cat({halves[1].neg(), halves[0]}, -1);
  return x * table.cosines.to(dtype) + turned * table.sines.to(dtype);
}

}  // namespace zero
