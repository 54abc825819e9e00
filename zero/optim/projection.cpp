#include "zero/optim/projection.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <variant>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/base/mix.h"
#include "zero/base/parallel.h"
#include "zero/optim/product.h"

namespace zero::optim {

namespace {

/// Fewer numbers than this are not worth another thread.
constexpr int64_t kGrain = 1 << 14;

int64_t grain_of(int64_t numel_of_each) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, numel_of_each));
}

/// Returns a number of [0, 1) from its highest 53 bits.
double uniform(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

/// Returns the sum of squares of `count` numbers, added in order.
double squares(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{values[i]} * double{values[i]};
  return sum;
}

/// The greatest factor: it is kept in fp32.
constexpr double kMost = std::numeric_limits<float>::max();

/// Returns the factor that two squares of norms give, or 0 for a gradient of zeros.
double factor_of(double updated, double projected) {
  return projected == 0 ? 0 : std::min(std::sqrt(updated) / std::sqrt(projected), kMost);
}

/// Gives each channel the sum of all.
void share_sum(std::vector<double>& of_channels) {
  double sum = 0;
  for (const double each : of_channels) sum += each;
  std::fill(of_channels.begin(), of_channels.end(), sum);
}

/// Returns the factor by which the limiter shortens an update whose norm is `norm`.
double limited(const Apollo& optimizer, double last, double norm) {
  const double most = optimizer.norm_growth * last;
  return most > 0 && norm > most ? most / norm : 1;
}

}  // namespace

std::optional<Projection> projection_of(const Optimizer& optimizer, c10::IntArrayRef sizes,
                                        c10::IntArrayRef strides) {
  const auto* apollo = std::get_if<Apollo>(&optimizer);
  if (apollo == nullptr || sizes.size() != 2 || sizes[0] == 0 || sizes[1] == 0) return {};
  const bool stored_by_rows = sizes[0] == 1 || sizes[1] == 1 || strides[1] == 1;
  const bool rows = sizes[0] >= sizes[1];
  const int64_t length = std::min(sizes[0], sizes[1]);
  return Projection{.channels = std::max(sizes[0], sizes[1]),
                    .length = length,
                    .rank = std::min(apollo->rank, length),
                    .by_rows = rows == stored_by_rows};
}

// Numbers of Box and Muller, in pairs. Their logarithms and sines are those of the C library.
void draw_projection(const Apollo& optimizer, std::string_view parameter, int64_t step,
                     const Projection& projection, float* values) {
  const uint64_t key =
      Hash().add(parameter).add(optimizer.seed).add((step - 1) / optimizer.update_proj_gap).value();
  const int64_t numel = projection.rank * projection.length;
  const double deviation = 1 / std::sqrt(static_cast<double>(projection.rank));
  parallel_for(0, (numel + 1) / 2, kGrain / 16, [&](int64_t first, int64_t last) {
    for (int64_t pair = first; pair < last; ++pair) {
      const auto number = static_cast<uint64_t>(pair) * 2;
      const double radius =
          deviation * std::sqrt(-2 * std::log(1 - uniform(mix(key + mix(number)))));
      const double angle = 2 * std::numbers::pi * uniform(mix(key + mix(number + 1)));
      values[2 * pair] = static_cast<float>(radius * std::cos(angle));
      if (2 * pair + 1 < numel) values[2 * pair + 1] = static_cast<float>(radius * std::sin(angle));
    }
  });
}

namespace {

/// Returns the projected channels (channels, rank) of a gradient.
at::Tensor projected(const at::Tensor& gradient, const Projection& projection,
                     const at::Tensor& drawn) {
  auto result = at::zeros({projection.channels, projection.rank}, gradient.options());
  product(result, 0, 1, projection.by_rows ? gradient : gradient.t(), drawn);
  return result;
}

/// Returns the square of the norm of each channel of a gradient.
std::vector<double> channel_squares(const at::Tensor& gradient, const Projection& projection) {
  const int64_t channels = projection.channels;
  const int64_t length = projection.length;
  const auto* values = gradient.const_data_ptr<float>();
  std::vector<double> sums(static_cast<size_t>(channels), 0);
  parallel_for(0, channels, grain_of(length), [&](int64_t first, int64_t last) {
    if (projection.by_rows) {
      for (int64_t c = first; c < last; ++c)
        sums[static_cast<size_t>(c)] = squares(values + c * length, length);
      return;
    }
    for (int64_t k = 0; k < length; ++k) {
      for (int64_t c = first; c < last; ++c) {
        const double value = values[k * channels + c];
        sums[static_cast<size_t>(c)] += value * value;
      }
    }
  });
  return sums;
}

}  // namespace

at::Tensor channel_factors(const Apollo& optimizer, std::string_view parameter, int64_t step,
                           const Projection& projection, const at::Tensor& gradient,
                           const ProjectedStates& states) {
  const int64_t channels = projection.channels;
  const int64_t rank = projection.rank;
  ensure(gradient.dim() == 2 && gradient.is_contiguous() && gradient.scalar_type() == at::kFloat &&
             gradient.size(projection.by_rows ? 0 : 1) == channels &&
             gradient.size(projection.by_rows ? 1 : 0) == projection.length,
         "a gradient to be projected is of fp32, contiguous and of its parameter's shape");
  auto drawn = at::empty({projection.length, rank}, gradient.options());
  draw_projection(optimizer, parameter, step, projection, drawn.mutable_data_ptr<float>());
  const auto found = projected(gradient, projection, drawn);
  drawn.reset();
  // AdamW's update of weights that are zero, with a rate of 1, is -u.
  const auto update_of_zeros = at::zeros({channels, rank}, gradient.options());
  update(AdamW{.lr = 1,
               .beta1 = optimizer.beta1,
               .beta2 = optimizer.beta2,
               .eps = optimizer.eps,
               .weight_decay = 0},
         step, 1, 1,
         Operands{.numel = channels * rank,
                  .master = update_of_zeros.mutable_data_ptr<float>(),
                  .state = {states.exp_avg, states.exp_avg_sq},
                  .gradient = found.const_data_ptr()});
  const Projection of_projected{.channels = channels, .length = rank};
  auto updated = channel_squares(update_of_zeros, of_projected);
  auto before = channel_squares(found, of_projected);
  if (optimizer.scale_type == Apollo::Scaling::tensor) {
    share_sum(updated);
    share_sum(before);
  }
  const auto squares_of_gradient = channel_squares(gradient, projection);
  std::vector<double> factors(updated.size());
  double sum = 0;
  for (size_t c = 0; c < factors.size(); ++c) {
    factors[c] = factor_of(updated[c], before[c]);
    sum += factors[c] * factors[c] * squares_of_gradient[c];
  }
  const double norm = std::sqrt(sum);
  const double ratio = limited(optimizer, *states.update_norm, norm);
  *states.update_norm = static_cast<float>(norm * ratio);
  auto result = at::empty({channels}, gradient.options());
  auto* to = result.mutable_data_ptr<float>();
  for (const double factor : factors)
    *to++ = static_cast<float>(std::min(factor * ratio * optimizer.alpha, kMost));
  return result;
}

void scale_channels(const Projection& projection, Interval elements, const float* factors,
                    float* values) {
  const int64_t row_length = projection.by_rows ? projection.length : projection.channels;
  const int64_t first_row = elements.begin / row_length;
  const int64_t last_row = (elements.end + row_length - 1) / row_length;
  parallel_for(first_row, last_row, grain_of(row_length), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = std::max(elements.begin, row * row_length);
      const int64_t end = std::min(elements.end, (row + 1) * row_length);
      auto* to = values + (begin - elements.begin);
      const auto* of_columns = factors + (begin - row * row_length);
      for (int64_t i = 0; i < end - begin; ++i)
        to[i] *= projection.by_rows ? factors[row] : of_columns[i];
    }
  });
}

void projected_direction_exact(const Apollo& optimizer, std::string_view parameter, int64_t step,
                               const Projection& projection, double* values,
                               const ExactProjectedStates& states) {
  const auto [channels, length, rank, by_rows] = projection;
  std::vector<float> drawn(static_cast<size_t>(rank * length));
  draw_projection(optimizer, parameter, step, projection, drawn.data());
  const auto element = [&, by = by_rows, channels = channels, length = length](
                           int64_t c, int64_t k) -> double& {
    return values[by ? c * length + k : k * channels + c];
  };
  const auto t = static_cast<double>(step);
  std::vector<double> updated(static_cast<size_t>(channels), 0);
  auto projected = updated;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < rank; ++j) {
      double r = 0;
      for (int64_t k = 0; k < length; ++k)
        r += double{drawn[static_cast<size_t>(k * rank + j)]} * element(c, k);
      double& m = states.exp_avg[c * rank + j];
      double& v = states.exp_avg_sq[c * rank + j];
      m = optimizer.beta1 * m + (1 - optimizer.beta1) * r;
      v = optimizer.beta2 * v + (1 - optimizer.beta2) * r * r;
      const double u = m / (1 - std::pow(optimizer.beta1, t)) /
                       (std::sqrt(v / (1 - std::pow(optimizer.beta2, t))) + optimizer.eps);
      updated[static_cast<size_t>(c)] += u * u;
      projected[static_cast<size_t>(c)] += r * r;
    }
  }
  if (optimizer.scale_type == Apollo::Scaling::tensor) {
    share_sum(updated);
    share_sum(projected);
  }
  double sum = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const auto at = static_cast<size_t>(c);
    for (int64_t k = 0; k < length; ++k) {
      element(c, k) *= factor_of(updated[at], projected[at]);
      sum += element(c, k) * element(c, k);
    }
  }
  const double ratio = limited(optimizer, *states.update_norm, std::sqrt(sum));
  *states.update_norm = std::sqrt(sum) * ratio;
  for (int64_t i = 0; i < channels * length; ++i) values[i] *= optimizer.alpha * ratio;
}

}  // namespace zero::optim
