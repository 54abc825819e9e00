#include "zero/optim/optimizer.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/optim/halves.h"
#include "zero/optim/kernels.h"
#include "zero/optim/scalars.h"

namespace zero::optim {
namespace {

/// Threads are given whole blocks of this many elements, so that their borders fall on cache lines
/// where the arrays do.
constexpr int64_t kBlock = 1024;
/// Fewer blocks than this are not worth another thread.
constexpr int64_t kGrain = 32;

/// Calls pass(begin, end) on LibTorch's intra-op threads, for ranges that cover [0, numel).
template <class Pass>
void in_parallel(int64_t numel, const Pass& pass) {
  parallel_for(0, at::ceil_div(numel, kBlock), kGrain, [&](int64_t first, int64_t last) {
    pass(first * kBlock, std::min(last * kBlock, numel));
  });
}

void check_range(const Optimizer& optimizer, const Range& range) {
  check_dtype(range.gradient_dtype, "gradient");
  if (range.parameter && range.parameter_dtype != c10::ScalarType::BFloat16 &&
      range.parameter_dtype != c10::ScalarType::Half) {
    throw ConfigError(fmt::format(
        "the low-precision copy of a parameter has dtype {}, but it may be BFloat16 or Half",
        c10::toString(range.parameter_dtype)));
  }
  if (range.lower && range.parameter_dtype != c10::ScalarType::BFloat16) {
    throw ConfigError(fmt::format(
        "the upper halves of split master weights have dtype {}, but they must be BFloat16",
        c10::toString(range.parameter_dtype)));
  }
  if (range.numel == 0) return;
  ensure(range.numel > 0 && range.gradient, "a range has elements and a gradient");
  ensure((range.master != nullptr) != (range.lower != nullptr && range.parameter != nullptr),
         "a range has master weights, whole or in two halves");
  const auto states = state_names(optimizer).size();
  for (size_t i = 0; i < 2; ++i) {
    ensure((range.state[i] != nullptr) == (i < states), "a range has its optimizer's states");
  }
}

}  // namespace

void check_dtype(c10::ScalarType dtype, std::string_view what) {
  if (dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 ||
      dtype == c10::ScalarType::Half) {
    return;
  }
  throw ConfigError(fmt::format("a {} has dtype {}, but it may be Float, BFloat16 or Half", what,
                                c10::toString(dtype)));
}

kernels::AdamWScalars scalars(const AdamW& o, int64_t step, double lr, double gradient_scale) {
  const double correction1 =
      o.bias_correction ? 1 - std::pow(o.beta1, static_cast<double>(step)) : 1;
  const double correction2 =
      o.bias_correction ? 1 - std::pow(o.beta2, static_cast<double>(step)) : 1;
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .decay = static_cast<float>(o.decoupled ? 1 - lr * o.weight_decay : 1),
          .l2 = static_cast<float>(o.decoupled ? 0 : o.weight_decay),
          .beta1 = static_cast<float>(o.beta1),
          .one_minus_beta1 = static_cast<float>(1 - o.beta1),
          .beta2 = static_cast<float>(o.beta2),
          .one_minus_beta2 = static_cast<float>(1 - o.beta2),
          .inverse_root_correction2 = static_cast<float>(1 / std::sqrt(correction2)),
          .eps = static_cast<float>(o.eps),
          .negative_step_size = static_cast<float>(-lr / correction1)};
}

kernels::SgdScalars scalars(const Sgd& o, int64_t step, double lr, double gradient_scale) {
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .l2 = static_cast<float>(o.weight_decay),
          .momentum = static_cast<float>(o.momentum),
          .one_minus_dampening = static_cast<float>(1 - o.dampening),
          .negative_lr = static_cast<float>(-lr),
          .first = step == 1,
          .nesterov = o.nesterov};
}

namespace {

void run(const AdamW& optimizer, int64_t step, double lr, double gradient_scale,
         const Range& range) {
  const auto s = scalars(optimizer, step, lr, gradient_scale);
  in_parallel(range.numel,
              [&](int64_t begin, int64_t end) { kernels::adamw(s, range, begin, end); });
}

void run(const Sgd& optimizer, int64_t step, double lr, double gradient_scale, const Range& range) {
  const auto s = scalars(optimizer, step, lr, gradient_scale);
  in_parallel(range.numel, [&](int64_t begin, int64_t end) { kernels::sgd(s, range, begin, end); });
}

void require(bool holds, std::string_view key, double value, std::string_view rule) {
  if (!holds)
    throw ConfigError(fmt::format("optimizer: {} is {}, but it must be {}", key, value, rule));
}

void check_common(double lr, double weight_decay) {
  require(std::isfinite(lr) && lr >= 0, "lr", lr, "at least 0");
  require(std::isfinite(weight_decay) && weight_decay >= 0, "weight_decay", weight_decay,
          "at least 0");
}

void check_one(const AdamW& o) {
  check_common(o.lr, o.weight_decay);
  require(o.beta1 >= 0 && o.beta1 < 1, "beta1", o.beta1, "at least 0 and below 1");
  require(o.beta2 >= 0 && o.beta2 < 1, "beta2", o.beta2, "at least 0 and below 1");
  require(std::isfinite(o.eps) && o.eps >= 0, "eps", o.eps, "at least 0");
}

void check_one(const Sgd& o) {
  check_common(o.lr, o.weight_decay);
  require(std::isfinite(o.momentum) && o.momentum >= 0, "momentum", o.momentum, "at least 0");
  require(std::isfinite(o.dampening), "dampening", o.dampening, "a number");
  if (o.nesterov) {
    require(o.momentum > 0, "momentum", o.momentum, "above 0 with nesterov");
    require(o.dampening == 0, "dampening", o.dampening, "0 with nesterov");
  }
}

}  // namespace

std::vector<std::string_view> state_names(const Optimizer& optimizer) {
  if (std::holds_alternative<AdamW>(optimizer)) return {"exp_avg", "exp_avg_sq"};
  if (std::get<Sgd>(optimizer).momentum != 0) return {"momentum_buffer"};
  return {};
}

void check(const Optimizer& optimizer) {
  std::visit([](const auto& o) { check_one(o); }, optimizer);
}

void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const Range& range) {
  check_range(optimizer, range);
  std::visit([&](const auto& o) { run(o, step, lr, gradient_scale, range); }, optimizer);
}

void split(const float* values, uint16_t* upper, uint16_t* lower, int64_t numel) {
  in_parallel(numel, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto halves = split(values[i]);
      upper[i] = halves.upper;
      if (lower) lower[i] = halves.lower;
    }
  });
}

void join(const uint16_t* upper, const uint16_t* lower, float* values, int64_t numel) {
  in_parallel(numel, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = join({upper[i], lower[i]});
  });
}

void fit_lower(const uint16_t* upper, uint16_t* lower, int64_t numel) {
  in_parallel(numel, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) lower[i] = lower_beside_written({upper[i], lower[i]});
  });
}

SquaredNorm squared_norm(const void* values, c10::ScalarType dtype, int64_t numel) {
  check_dtype(dtype, "array of a norm");
  // The blocks' sums are kept in a fixed number of places, so that no memory is allocated.
  std::array<double, 2048> sums;
  const int64_t blocks = at::ceil_div(numel, kernels::kNormBlock);
  double sum = 0;
  for (int64_t done = 0; done < blocks;) {
    const int64_t batch = std::min<int64_t>(blocks - done, sums.size());
    parallel_for(0, batch, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = (done + i) * kernels::kNormBlock;
        sums[static_cast<size_t>(i)] = kernels::squared_norm_block(
            values, dtype, begin, std::min(begin + kernels::kNormBlock, numel));
      }
    });
    for (int64_t i = 0; i < batch; ++i) sum += sums[static_cast<size_t>(i)];
    done += batch;
  }
  // The square of a finite fp32 value is below 1.2e77, so a sum of them is finite in fp64.
  return {.sum = sum, .finite = std::isfinite(sum)};
}

void accumulate(float* destination, const void* source, c10::ScalarType source_dtype,
                int64_t numel) {
  check_dtype(source_dtype, "gradient");
  in_parallel(numel, [&](int64_t begin, int64_t end) {
    kernels::accumulate(destination, source, source_dtype, begin, end);
  });
}

}  // namespace zero::optim
