// The optimizers of libzero: fused passes over flat shards.
//
// A pass reads the gradient, multiplies it by `gradient_scale` (1/N, 1/k, loss scale and clip
// factor in one number), updates the master weights and the moments in fp32, and writes the
// parameter's bf16 or fp16 copy where there is one. An element's new value depends on that
// element's values alone: not on the slice, the vector tail or the threads. (Of LAMB, Muon and
// Adafactor also on its parameter's: passes.h.)
//
// A new element-wise optimizer is one file, as lion.cpp: its kernel, the names of its states and
// the limits of its numbers (algorithm.h), with its formula beside it (lion_step.h, and step_of in
// device_elements.h for devices); its values are a struct here, in the list `Optimizer`. A file in
// zero/config/optimizers has its keys and options. The engine's tables, checks and checkpoints go
// over these. The lists in tests/optim and tests/compositions/choices.cpp and the table in
// docs/optimizers.md need a row each.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "zero/optim/state_format.h"

namespace zero {

namespace optim {
template <class T>
struct Algorithm;
}

/// Adam with decoupled weight decay (AdamW, 1711.05101), or with L2 decay added to the gradient
/// (`decoupled` false, Adam, 1412.6980).
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool decoupled = true;
  bool bias_correction = true;
  bool operator==(const AdamW&) const = default;
  static const optim::Algorithm<AdamW>& algorithm();
};

/// Stochastic gradient descent with momentum, as torch::optim::SGD: the first step sets the
/// momentum buffer to the gradient.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool operator==(const Sgd&) const = default;
  static const optim::Algorithm<Sgd>& algorithm();
};

/// Adagrad (Duchi, Hazan and Singer, JMLR 2011), as torch::optim::Adagrad; L2 decay.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double weight_decay = 0.0;
  double initial_accumulator_value = 0.0;
  double eps = 1e-10;
  bool operator==(const Adagrad&) const = default;
  static const optim::Algorithm<Adagrad>& algorithm();
};

/// Lion (2302.06675, program 1): the sign of a moving mean; decoupled decay.
struct Lion {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  bool operator==(const Lion&) const = default;
  static const optim::Algorithm<Lion>& algorithm();
};

/// LAMB (1904.00962), as DeepSpeed's FusedLamb: Adam's direction, whose step is as long as the
/// parameter's norm says. The correction of the moments is part of the rate, and so acts on the
/// decay too.
struct Lamb {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double min_coeff = 0.01;  ///< least trust ratio
  double max_coeff = 10.0;  ///< greatest trust ratio
  bool bias_correction = true;
  bool eps_inside_sqrt = false;
  bool operator==(const Lamb&) const = default;
  static const optim::Algorithm<Lamb>& algorithm();
};

/// Muon (K. Jordan and others, 2024): momentum whose matrices are made orthogonal. For hidden
/// weights of two dimensions; in a parameter group that has others too the engine trains those
/// with AdamW (optim::beside_matrices).
struct Muon {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0.0;  ///< decoupled
  bool nesterov = true;
  int64_t ns_steps = 5;             ///< Newton-Schulz iterations
  std::optional<double> adam_lr{};  ///< of the others; none: `lr`
  double beta1 = 0.9;               ///< this and what follows: of the others
  double beta2 = 0.999;
  double eps = 1e-8;
  bool operator==(const Muon&) const = default;
  static const optim::Algorithm<Muon>& algorithm();
};

/// Adafactor (1804.04235), as torch::optim::Adafactor: of a matrix the second moment is kept by
/// rows and columns alone, and the update is as long as the parameter's and its own mean squares
/// say.
struct Adafactor {
  double lr = 1e-2;           ///< and the most of a relative step
  double beta2_decay = -0.8;  ///< the share of a new square in step t is t to this power
  /// The least second moment is its square, and the least mean of a matrix's its own; or, with
  /// `eps_added`, what is added to squares. None: 2^-23, or 1e-30.
  std::optional<double> eps1{};
  double eps2 = 1e-3;           ///< least root of a parameter's mean square
  double d = 1.0;               ///< greatest root of an update's
  double weight_decay = 0.0;    ///< decoupled: of `lr` alone
  bool scale_parameter = true;  ///< the rate is times that root of the parameter
  bool relative_step = true;    ///< the rate of step t is at most 1 / sqrt(t)
  bool warmup_init = false;     ///< and at most t / 1000000
  bool eps_added = false;       ///< as in the paper and in transformers
  /// By rows and columns; else one by element. The engine factors parameters of two dimensions or
  /// more alone (optim::suited).
  bool factored = true;
  double first_eps() const { return eps1.value_or(eps_added ? 1e-30 : 0x1p-23); }
  bool operator==(const Adafactor&) const = default;
  static const optim::Algorithm<Adafactor>& algorithm();
};

using Optimizer = std::variant<AdamW, Sgd, Adagrad, Lion, Lamb, Muon, Adafactor>;

namespace optim {

/// The most state arrays that an optimizer has besides the master weights.
inline constexpr size_t kMostStates = 2;

/// The fp32 state arrays besides the master weights, by the names that checkpoints use:
/// AdamW {"exp_avg", "exp_avg_sq"}; Sgd {"momentum_buffer"}, or {} without momentum; Adagrad
/// {"sum"}; Lion {"exp_avg"}; Lamb as AdamW; Muon {"momentum_buffer"}; Adafactor {"variance"}, or
/// {} where it factors it (factors.h).
std::vector<std::string_view> state_names(const Optimizer& optimizer);

/// Returns the signs that the values of each state may have: squares are never negative.
std::array<Sign, kMostStates> state_signs(const Optimizer& optimizer);

/// As configuration files name it: "AdamW".
std::string_view name(const Optimizer& optimizer);

/// Its learning rate.
double lr(const Optimizer& optimizer);
/// The same without weight decay.
Optimizer without_decay(Optimizer optimizer);

/// A contiguous range of one segment on this rank. All pointers have `numel` elements; none may
/// overlap another.
struct Range {
  int64_t numel = 0;
  /// All arrays lie here. On a device an update is enqueued on this thread's current stream
  /// (operators.h), and master weights may not be split.
  c10::Device device{c10::kCPU};
  float* master = nullptr;    ///< fp32 weights, updated in place; null if `lower` is set
  uint16_t* lower = nullptr;  ///< their lower halves: Note [Split master weights] in halves.h
  std::array<float*, kMostStates> state{};  ///< as state_names() orders them; else null
  const void* gradient = nullptr;           ///< of `gradient_dtype`: Float, BFloat16 or Half
  c10::ScalarType gradient_dtype = c10::ScalarType::Float;
  /// Scaled gradients beyond it, or below its negative, count as it.
  float gradient_limit = std::numeric_limits<float>::infinity();
  void* parameter = nullptr;  ///< null (the master is the parameter), or the low-precision copy;
                              ///< with `lower` the upper halves, updated in place
  c10::ScalarType parameter_dtype =
      c10::ScalarType::Float;  ///< BFloat16 or Half when `parameter` is set; BFloat16 with `lower`
};

/// Throws ConfigError naming the first hyper-parameter of `optimizer` that cannot be used (a
/// negative rate, beta1 = 1, ...).
void check(const Optimizer& optimizer);

/// Returns the optimizer for a parameter of so many dimensions: Adafactor has whole second moments
/// where there are fewer than two.
Optimizer suited(Optimizer optimizer, int64_t dimensions);

/// Applies update number `step` (1 for the first) with rate `lr` (in place of the optimizer's own,
/// so that schedules apply) to `range`. Uses LibTorch's intra-op threads. Vectorised with run-time
/// dispatch. Throws ConfigError for a dtype that a Range may not have. Of Lamb, and of
/// Adafactor that is not factored, `range` is a whole parameter; updates of matrices are not of
/// ranges (passes.h).
void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const Range& range);

/// The same as `update` in plain loops, one element at a time: what it is tested against, in bits.
void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const Range& range);

/// Elements in double, as a Range has them in fp32. `gradient` is scaled.
struct ExactRange {
  int64_t numel = 0;
  double* weights = nullptr;
  std::array<double*, kMostStates> state{};
  const double* gradient = nullptr;
};
/// The same formulas in double: what they are compared by with other implementations.
void update_exact(const Optimizer& optimizer, int64_t step, double lr, const ExactRange& range);

/// Splits `numel` fp32 values (`lower` may be null), and puts them together again: Note [Split
/// master weights]. On LibTorch's intra-op threads.
void split(const float* values, uint16_t* upper, uint16_t* lower, int64_t numel);
void join(const uint16_t* upper, const uint16_t* lower, float* values, int64_t numel);
/// Sets to 0 what is left over beside upper halves that something else has written.
void fit_lower(const uint16_t* upper, uint16_t* lower, int64_t numel);

/// The sum of squares of `numel` elements (Float, BFloat16 or Half) in fp64, and whether any is
/// infinite or NaN. The order of summation depends on `numel` alone (fixed blocks, added in order),
/// not on threads, alignment or instruction set.
struct SquaredNorm {
  double sum = 0;
  bool finite = true;
};
SquaredNorm squared_norm(const void* values, c10::ScalarType dtype, int64_t numel);
SquaredNorm squared_norm_reference(const void* values, c10::ScalarType dtype, int64_t numel);

/// destination (fp32) += source (Float, BFloat16 or Half), element by element.
void accumulate(float* destination, const void* source, c10::ScalarType source_dtype,
                int64_t numel);
void accumulate_reference(float* destination, const void* source, c10::ScalarType source_dtype,
                          int64_t numel);

}  // namespace optim
}  // namespace zero
