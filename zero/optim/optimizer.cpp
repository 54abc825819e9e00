#include "zero/optim/optimizer.h"

#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>
#include <string>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/device/stream.h"
#include "zero/optim/algorithm.h"
#include "zero/optim/halves.h"
#include "zero/optim/kernels.h"
#include "zero/optim/matrix_step.h"
#include "zero/optim/operators.h"

namespace zero::optim {
namespace {

/// Threads get whole blocks of this many elements, so that their borders fall on cache lines if the
/// arrays begin on one.
constexpr int64_t kBlock = 1024;
/// Fewer blocks than this are not worth another thread.
constexpr int64_t kGrain = 32;

/// Calls sweep(begin, end) on LibTorch's intra-op threads, for ranges that cover [0, numel).
template <class Sweep>
void in_parallel(int64_t numel, const Sweep& sweep) {
  parallel_for(0, at::ceil_div(numel, kBlock), kGrain, [&](int64_t first, int64_t last) {
    sweep(first * kBlock, std::min(last * kBlock, numel));
  });
}

void check_range(const Optimizer& optimizer, const Operands& operands, bool gradients = true) {
  check_dtype(operands.gradient_dtype, "gradient");
  if (operands.parameter && operands.parameter_dtype != c10::ScalarType::BFloat16 &&
      operands.parameter_dtype != c10::ScalarType::Half) {
    throw ConfigError(fmt::format(
        "the low-precision copy of a parameter has dtype {}, but it may be BFloat16 or Half",
        c10::toString(operands.parameter_dtype)));
  }
  if (operands.lower && operands.parameter_dtype != c10::ScalarType::BFloat16) {
    throw ConfigError(fmt::format(
        "the upper halves of split master weights have dtype {}, but they must be BFloat16",
        c10::toString(operands.parameter_dtype)));
  }
  if (operands.numel == 0) return;
  ensure(operands.gradient_limit > 0, "gradients are cut off beyond a limit above 0");
  ensure(operands.numel > 0 && (operands.gradient != nullptr || !gradients),
         "operands have elements and a gradient");
  ensure(
      (operands.master != nullptr) != (operands.lower != nullptr && operands.parameter != nullptr),
      "operands have master weights, whole or in two halves");
  const auto states = state_names(optimizer).size();
  for (size_t i = 0; i < kMostStates; ++i) {
    ensure((operands.state[i] != nullptr) == (i < states),
           "operands have their optimizer's states");
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

void refuse(std::string_view key, double value, std::string_view rule) {
  throw ConfigError(fmt::format("optimizer: {} is {}, but it must be {}", key, value, rule));
}

namespace {

template <class T>
const Algorithm<T>& algorithm_of(const T& /*optimizer*/) {
  return T::algorithm();
}

template <class T>
void check_number(const Limit<T>& limit, double value) {
  const bool fits = std::isfinite(value) && (!limit.least || value >= *limit.least) &&
                    (!limit.most || value <= *limit.most) && (!limit.below || value < *limit.below);
  if (fits) return;
  std::string rule;
  const auto add = [&](std::string_view word, std::optional<double> bound) {
    if (bound) rule += fmt::format("{}{} {}", rule.empty() ? "" : " and ", word, *bound);
  };
  add("at least", limit.least);
  add("at most", limit.most);
  add("below", limit.below);
  refuse(limit.name, value, rule.empty() ? "a number" : rule);
}

template <class T>
void check_values(const T& optimizer) {
  for (const auto& limit : T::algorithm().limits) {
    std::visit(
        [&](const auto& member) {
          const auto& value = optimizer.*member;
          if constexpr (requires { value.has_value(); }) {
            if (value) check_number(limit, static_cast<double>(*value));
          } else {
            check_number(limit, static_cast<double>(value));
          }
        },
        limit.member);
  }
  if (const auto check = T::algorithm().check) check(optimizer);
}

}  // namespace

std::vector<std::string_view> state_names(const Optimizer& optimizer) {
  return std::visit([](const auto& o) { return algorithm_of(o).state_names(o); }, optimizer);
}

std::vector<FactoredState> factored_states(const Optimizer& optimizer, c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides) {
  return std::visit(
      [&](const auto& o) {
        const auto of = algorithm_of(o).factored_states;
        return of ? of(o, sizes, strides) : std::vector<FactoredState>{};
      },
      optimizer);
}

std::array<Sign, kMostStates> state_signs(const Optimizer& optimizer) {
  return std::visit([](const auto& o) { return algorithm_of(o).signs; }, optimizer);
}

std::string_view name(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        const auto& known = algorithm_of(o);
        return known.name_of ? known.name_of(o) : known.name;
      },
      optimizer);
}

double rate_in_force(const Optimizer& optimizer, double lr, int64_t step) {
  return std::visit(
      [&](const auto& o) {
        const auto of = algorithm_of(o).rate;
        return of ? of(o, {.step = step, .lr = lr}) : lr;
      },
      optimizer);
}

std::optional<double> evaluated(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        const auto of = algorithm_of(o).evaluated;
        return of ? std::optional(of(o)) : std::nullopt;
      },
      optimizer);
}

double lr(const Optimizer& optimizer) {
  return std::visit([](const auto& o) { return o.lr; }, optimizer);
}

Optimizer without_decay(Optimizer optimizer) {
  std::visit([](auto& o) { o.weight_decay = 0; }, optimizer);
  return optimizer;
}

std::optional<AdamW> beside_matrices(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        const auto of = algorithm_of(o).beside_matrices;
        return of ? std::optional(of(o)) : std::nullopt;
      },
      optimizer);
}

std::optional<double>* rate_beside_matrices(Optimizer& optimizer) {
  return std::visit(
      [](auto& o) -> std::optional<double>* {
        if constexpr (requires { o.adam_lr; }) {
          return &o.adam_lr;
        } else {
          return nullptr;
        }
      },
      optimizer);
}

Optimizer suited(Optimizer optimizer, int64_t dimensions) {
  if (auto* adafactor = std::get_if<Adafactor>(&optimizer))
    adafactor->factored = adafactor->factored && dimensions >= 2;
  return optimizer;
}

Optimizer optimizer_for(const Optimizer& optimizer, std::string_view name, int64_t dimensions) {
  if (const auto beside = beside_matrices(optimizer); beside && !is_hidden_matrix(name, dimensions))
    return *beside;
  return suited(optimizer, dimensions);
}

void check(const Optimizer& optimizer) {
  std::visit([](const auto& o) { check_values(o); }, optimizer);
}

namespace {

void run(const Optimizer& optimizer, Moment moment, double gradient_scale,
         const Operands& operands) {
  std::visit(
      [&](const auto& o) {
        const auto kernel = algorithm_of(o).update;
        in_parallel(operands.numel, [&](int64_t begin, int64_t end) {
          kernel(o, moment, static_cast<float>(gradient_scale), operands, begin, end);
        });
      },
      optimizer);
}

// Makes both sweeps over a whole parameter of Reach::parameter.
template <class First, class Second>
void two_sweeps(const Optimizer& optimizer, Moment moment, Operands operands, const First& first,
                const Second& second) {
  std::vector<float> direction;
  Findings findings;
  if (keeps_direction(optimizer)) {
    direction.resize(static_cast<size_t>(operands.numel));
    findings.direction = direction.data();
  }
  first(operands, findings);
  moment.ratio = ratio(optimizer, findings.norms, operands.numel);
  if (keeps_direction(optimizer)) {
    operands.gradient = direction.data();
    operands.gradient_dtype = c10::ScalarType::Float;
    operands.gradient_limit = std::numeric_limits<float>::infinity();
  }
  second(moment, operands);
}

}  // namespace

void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const Operands& operands) {
  check_range(optimizer, operands);
  if (is_asynchronous(operands.device)) {
    enqueue_update(optimizer, {step, lr}, gradient_scale, operands);
    return;
  }
  Moment moment{step, lr};
  ensure(reach(optimizer) == Reach::element || reach(optimizer) == Reach::parameter,
         "an update of operands is not one of a matrix");
  if (reach(optimizer) == Reach::element) {
    run(optimizer, moment, gradient_scale, operands);
    return;
  }
  two_sweeps(
      optimizer, moment, operands,
      [&](const Operands& of, Findings& findings) {
        first_sweep(optimizer, step, gradient_scale, of, findings);
      },
      [&](Moment then, const Operands& of) { run(optimizer, then, 1, of); });
}

void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const Operands& operands) {
  const auto sweep = [&](Moment moment, double scale, const Operands& of) {
    std::visit(
        [&](const auto& o) {
          algorithm_of(o).update_reference(o, moment, static_cast<float>(scale), of);
        },
        optimizer);
  };
  if (reach(optimizer) != Reach::parameter) {
    sweep({step, lr}, gradient_scale, operands);
    return;
  }
  two_sweeps(
      optimizer, {step, lr}, operands,
      [&](const Operands& of, Findings& findings) {
        first_sweep_reference(optimizer, step, gradient_scale, of, findings);
      },
      [&](Moment then, const Operands& of) { sweep(then, 1, of); });
}

Reach reach(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        const auto& known = algorithm_of(o);
        return known.is_factored && known.is_factored(o) ? Reach::factors : known.reach;
      },
      optimizer);
}

bool keeps_direction(const Optimizer& optimizer) {
  return reach(optimizer) == Reach::matrix ||
         std::visit([](const auto& o) { return algorithm_of(o).keeps_direction; }, optimizer);
}

void first_sweep(const Optimizer& optimizer, int64_t step, double gradient_scale,
                 const Operands& operands, Findings& findings) {
  check_range(optimizer, operands);
  if (is_asynchronous(operands.device)) {
    enqueue_update(optimizer, {.step = step, .sweep = Sweep::first}, gradient_scale,
                   to_direction(operands, findings.direction));
    return;
  }
  std::mutex mutex;
  std::visit(
      [&](const auto& o) {
        const auto kernel = algorithm_of(o).first_sweep;
        in_parallel(operands.numel, [&](int64_t begin, int64_t end) {
          Findings mine{.direction = findings.direction};
          kernel(o, {step}, static_cast<float>(gradient_scale), operands, mine, begin, end);
          const std::lock_guard lock(mutex);
          findings.norms.add(mine.norms);
        });
      },
      optimizer);
}

void first_sweep_reference(const Optimizer& optimizer, int64_t step, double gradient_scale,
                           const Operands& operands, Findings& findings) {
  std::visit(
      [&](const auto& o) {
        algorithm_of(o).first_sweep_reference(o, {step}, static_cast<float>(gradient_scale),
                                              operands, findings);
      },
      optimizer);
}

double ratio(const Optimizer& optimizer, const ParameterNorms& norms, int64_t numel) {
  return std::visit([&](const auto& o) { return algorithm_of(o).ratio(o, norms, numel); },
                    optimizer);
}

void second_sweep(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                  const Operands& operands) {
  check_range(optimizer, operands, keeps_direction(optimizer));
  const Moment moment{step, lr, ratio, Sweep::second};
  if (is_asynchronous(operands.device)) {
    enqueue_update(optimizer, moment, 1, operands);
  } else {
    run(optimizer, moment, 1, operands);
  }
}

void second_sweep_reference(const Optimizer& optimizer, int64_t step, double lr, double ratio,
                            const Operands& operands) {
  std::visit(
      [&](const auto& o) {
        algorithm_of(o).update_reference(o, {step, lr, ratio}, 1, operands);
      },
      optimizer);
}

void update_exact(const Optimizer& optimizer, int64_t step, double lr,
                  const ExactOperands& operands) {
  std::visit(
      [&](const auto& o) {
        algorithm_of(o).update_exact(o, {step, lr}, operands);
      },
      optimizer);
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
