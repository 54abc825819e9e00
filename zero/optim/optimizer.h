// The optimizers of libzero: one fused pass over flat shards.
//
// A pass reads the gradient, multiplies it by `gradient_scale` (1/N, 1/k, loss scale and clip
// factor in one number), updates the master weights and the moments in fp32, and writes the
// parameter's bf16 or fp16 copy where there is one. An element's new value depends on that
// element's values alone: not on the slice, the vector tail or the threads.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <variant>
#include <vector>

namespace zero {

/// Adam with decoupled weight decay (AdamW, 1711.05101), or with L2 decay added to the gradient
/// (`decoupled` false, Adam).
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool decoupled = true;
  bool bias_correction = true;
  bool operator==(const AdamW&) const = default;
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
};

using Optimizer = std::variant<AdamW, Sgd>;

namespace optim {

/// The fp32 state arrays besides the master weights, by the names that checkpoints use:
/// AdamW {"exp_avg", "exp_avg_sq"}; Sgd {"momentum_buffer"}, or {} without momentum.
std::vector<std::string_view> state_names(const Optimizer& optimizer);

/// A contiguous range of one segment on this rank. All pointers have `numel` elements; none may
/// overlap another.
struct Range {
  int64_t numel = 0;
  float* master = nullptr;    ///< fp32 weights, updated in place; null if `lower` is set
  uint16_t* lower = nullptr;  ///< their lower halves: Note [Split master weights] in halves.h
  float* state[2] = {nullptr, nullptr};  ///< as state_names() orders them
  const void* gradient = nullptr;        ///< of `gradient_dtype`: Float, BFloat16 or Half
  c10::ScalarType gradient_dtype = c10::ScalarType::Float;
  void* parameter = nullptr;  ///< null (the master is the parameter), or the low-precision copy;
                              ///< with `lower` the upper halves, updated in place
  c10::ScalarType parameter_dtype =
      c10::ScalarType::Float;  ///< BFloat16 or Half when `parameter` is set; BFloat16 with `lower`
};

/// Throws ConfigError naming the first hyper-parameter of `optimizer` that cannot be used (a
/// negative rate, beta1 = 1, ...).
void check(const Optimizer& optimizer);

/// Applies update number `step` (1 for the first) with rate `lr` (in place of the optimizer's own,
/// so that schedules apply) to `range`. Uses LibTorch's intra-op threads. Vectorised with run-time
/// dispatch. Throws ConfigError for a dtype that a Range may not have.
void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const Range& range);

/// Splits `numel` fp32 values (`lower` may be null), and puts them together again: Note [Split
/// master weights]. On LibTorch's intra-op threads.
void split(const float* values, uint16_t* upper, uint16_t* lower, int64_t numel);
void join(const uint16_t* upper, const uint16_t* lower, float* values, int64_t numel);
/// Sets to 0 what is left over beside upper halves that something else has written.
void fit_lower(const uint16_t* upper, uint16_t* lower, int64_t numel);

/// The same as `update` in plain loops, one element at a time: what it is tested against.
void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const Range& range);

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
