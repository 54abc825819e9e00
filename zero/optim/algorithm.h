// The file of each optimizer describes it by these tables: name, limits of its numbers, states,
// formula, kernel. Checks, tests and the engine go over the tables. zero/config/optimizers has the
// keys of each optimizer in configuration files.
//
// Note [An optimizer's file]
// The file of an optimizer has the formula twice. `Step<Number>` has the numbers of a step,
// computed in fp64 and rounded once, and the formula for one element in plain arithmetic. With
// float its results are those that the kernel must equal in bits; with double they are compared
// with other implementations. The kernel is the same formula over vectors (elementwise-inl.h), once
// for each instruction set. `Step` of an element-wise optimizer is in a header of its own
// (adamw_step.h), since kernels of devices use it too, through device_elements.h, which lists them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {

/// A number of an optimizer's struct T, and the limits between which it must lie. Each number must
/// be finite.
template <class T>
struct Limit {
  std::string_view name;  ///< its name in errors
  std::variant<double T::*, int64_t T::*, std::optional<double> T::*, std::optional<int64_t> T::*>
      member;
  std::optional<double> least = {};
  std::optional<double> most = {};
  std::optional<double> below = {};
};

template <class T>
struct Algorithm {
  std::string_view name;  ///< in reports and configuration files
  std::vector<Limit<T>> limits;
  std::vector<std::string_view> (*state_names)(const T&) = nullptr;
  std::array<Sign, kMostStates> signs{};  ///< signs of the states' values
  /// Returns the name if it depends on the values. Null means that it is always `name`.
  std::string_view (*name_of)(const T&) = nullptr;
  /// Returns the rate in force, of an optimizer that warms up by itself. Null: it is Moment::lr.
  double (*rate)(const T&, Moment) = nullptr;
  /// Returns the number of optim::evaluated. Null: the optimizer evaluates what it trains.
  double (*evaluated)(const T&) = nullptr;
  /// Throws a ConfigError if values do not go together.
  void (*check)(const T&) = nullptr;
  Reach reach = Reach::element;
  /// Returns whether the reach is Reach::factors for these values. Null means never.
  bool (*is_factored)(const T&) = nullptr;
  /// Does what optim::factored_states does. Null means that there are none.
  std::vector<FactoredState> (*factored_states)(const T&, c10::IntArrayRef sizes,
                                                c10::IntArrayRef strides) = nullptr;
  /// Returns the AdamW for what the optimizer does not train; it takes hidden matrices alone (see
  /// optim::beside_matrices). Null means that it trains everything.
  AdamW (*beside_matrices)(const T&) = nullptr;
  /// If true, the second sweep needs the directions of the first sweep (Reach::parameter).
  bool keeps_direction = false;
  /// The first sweep over elements [begin, end). It leaves the weights as they are. Null if the
  /// reach is Reach::element.
  void (*first_sweep)(const T&, Moment, float gradient_scale, const Operands&, Findings&,
                      int64_t begin, int64_t end) = nullptr;
  void (*first_sweep_reference)(const T&, Moment, float gradient_scale, const Operands&,
                                Findings&) = nullptr;
  /// Returns Moment::ratio for a parameter of `numel` elements (Reach::parameter, Reach::factors).
  double (*ratio)(const T&, const ParameterNorms&, int64_t numel) = nullptr;
  /// Runs the kernel over elements [begin, end): the whole update, or the second sweep.
  void (*update)(const T&, Moment, float gradient_scale, const Operands&, int64_t begin,
                 int64_t end) = nullptr;
  /// Does the same as `update`, for all elements in plain loops.
  void (*update_reference)(const T&, Moment, float gradient_scale, const Operands&) = nullptr;
  void (*update_exact)(const T&, Moment, const ExactOperands&) = nullptr;
};

/// Calls f(T()) for every optimizer T, in the order of `Optimizer`.
template <class F>
void for_each_algorithm(const F& f) {
  [&]<class... T>(std::type_identity<std::variant<T...>>) {
    (f(T()), ...);
  }(std::type_identity<Optimizer>());
}

/// Throws a ConfigError which says that hyper-parameter `key` has `value`, and must be as `rule`
/// says.
[[noreturn]] void refuse(std::string_view key, double value, std::string_view rule);

/// Throws a ConfigError unless `dtype` is Float, BFloat16 or Half. `what` names the array.
void check_dtype(c10::ScalarType dtype, std::string_view what);

// Plain loops read and write elements with these functions.

/// Return the weight and the scaled gradient of element `i` in fp32. The gradient is 0 if there
/// is none.
float weight_at(const Operands& operands, int64_t i);
float gradient_at(const Operands& operands, int64_t i, float scale);
/// Writes a weight and its low-precision copy.
void set_weight_at(const Operands& operands, int64_t i, float value);
/// Returns the sum of a block's squares in fp64, added in the order of the kernels.
double sum_of_squares(const std::array<float, ExactSum::kBlock>& values);

/// Does what Algorithm::update_reference does, by the formula in Step<float>.
template <template <class> class Step, class T>
void plain_update(const T& optimizer, Moment moment, float gradient_scale,
                  const Operands& operands) {
  const Step<float> step(optimizer, moment);
  for (int64_t i = 0; i < operands.numel; ++i) {
    float p = weight_at(operands, i);
    std::array<float, kMostStates> state{};
    for (size_t s = 0; s < kMostStates; ++s)
      state[s] = operands.state[s] ? operands.state[s][i] : 0;
    step.apply(p, gradient_at(operands, i, gradient_scale), state);
    for (size_t s = 0; s < kMostStates; ++s) {
      if (operands.state[s]) operands.state[s][i] = state[s];
    }
    set_weight_at(operands, i, p);
  }
}

/// Does what Algorithm::update_exact does, by the formula in Step<double>.
template <template <class> class Step, class T>
void exact_update(const T& optimizer, Moment moment, const ExactOperands& operands) {
  const Step<double> step(optimizer, moment);
  for (int64_t i = 0; i < operands.numel; ++i) {
    std::array<double, kMostStates> state{};
    for (size_t s = 0; s < kMostStates; ++s)
      state[s] = operands.state[s] ? operands.state[s][i] : 0;
    step.apply(operands.weights[i], operands.gradient[i], state);
    for (size_t s = 0; s < kMostStates; ++s) {
      if (operands.state[s]) operands.state[s][i] = state[s];
    }
  }
}

}  // namespace zero::optim
