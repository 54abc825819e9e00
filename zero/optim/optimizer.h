// The optimizers of libzero: fused sweeps over flat shards.
//
// A sweep reads the gradient, multiplies it by `gradient_scale` (1/N, 1/k, loss scale and clip
// factor in one number), updates the master weights and the moments in fp32, and writes the
// parameter's bf16 or fp16 copy if there is one. An element's new value depends on that element's
// values alone, and not on the slice, the vector tail or the threads. (With LAMB, Muon,
// Apollo and Adafactor it also depends on the other elements of its parameter: see sweeps.h.)
//
// A new element-wise optimizer is one file, such as lion.cpp. The file has its kernel, the names of
// its states and the limits of its numbers (algorithm.h). Its formula is in a header beside it
// (lion_step.h), with a step_of in device_elements.h for devices. Its values are a struct here,
// which stands in the list `Optimizer`. A file in zero/config/optimizers has its keys and options.
// The engine's tables, checks and checkpoints go over these. The lists in tests/optim and
// tests/compositions/choices.cpp and the table in docs/optimizers.md need a row each.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

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

/// Adagrad (Duchi, Hazan and Singer, JMLR 2011), as torch::optim::Adagrad. Its weight decay is L2
/// decay.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double weight_decay = 0.0;
  double initial_accumulator_value = 0.0;
  double eps = 1e-10;
  bool operator==(const Adagrad&) const = default;
  static const optim::Algorithm<Adagrad>& algorithm();
};

/// Lion (2302.06675, program 1): the update is the sign of a moving mean. Its weight decay is
/// decoupled.
struct Lion {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  bool operator==(const Lion&) const = default;
  static const optim::Algorithm<Lion>& algorithm();
};

/// LAMB (1904.00962), as DeepSpeed's FusedLamb: a step goes in Adam's direction, and its length
/// depends on the parameter's norm. The correction of the moments is part of the rate, and so acts
/// on the decay too.
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

/// Muon (K. Jordan and others, 2024): the momentum of each matrix is made orthogonal. It is for
/// hidden weights of two dimensions. If a parameter group has other parameters too, the engine
/// trains those with AdamW (optim::beside_matrices).
struct Muon {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0.0;  ///< decoupled
  bool nesterov = true;
  int64_t ns_steps = 5;             ///< Newton-Schulz iterations
  std::optional<double> adam_lr{};  ///< AdamW's rate for the other parameters; none: `lr`
  double beta1 = 0.9;               ///< this and the next two are AdamW's
  double beta2 = 0.999;
  double eps = 1e-8;
  bool operator==(const Muon&) const = default;
  static const optim::Algorithm<Muon>& algorithm();
};

/// APOLLO (2412.05270, algorithm 1): a channel of a matrix goes along its raw gradient. How far it
/// goes follows from AdamW's moments of a few numbers, to which a random projection takes the
/// channel: Note [Projections] in projection.h. Channels are the rows of a matrix, or its columns
/// if there are more of them. It is for hidden weights of two dimensions, as Muon is.
struct Apollo {
  enum class Scaling : uint8_t { channel, tensor };
  double lr = 0.01;
  int64_t rank = 256;  ///< numbers that stand for a channel; at most its length is used
  /// The factor of a gradient is each channel's, or one for the whole matrix.
  Scaling scale_type = Scaling::channel;
  double alpha = 1.0;             ///< factor of all updates of matrices
  int64_t update_proj_gap = 200;  ///< updates of a parameter that have the same projection
  /// The norm of a matrix's update before alpha and lr is at most this times the last one's (the
  /// limiter of Fira, 2410.01623); 0: there is no limit.
  double norm_growth = 1.01;
  int64_t seed = 0;                 ///< decides all projections, with a parameter's name and update
  double weight_decay = 0.0;        ///< decoupled
  std::optional<double> adam_lr{};  ///< AdamW's rate for the other parameters; none: `lr`
  double beta1 = 0.9;               ///< this and the next two are AdamW's, of both
  double beta2 = 0.999;
  double eps = 1e-6;
  /// Returns APOLLO-Mini: rank 1, one factor for a matrix, and alpha as the root of 128.
  static Apollo mini() {
    return {.rank = 1, .scale_type = Scaling::tensor, .alpha = 11.313708498984761};
  }
  bool operator==(const Apollo&) const = default;
  static const optim::Algorithm<Apollo>& algorithm();
};

/// Adafactor (1804.04235), as torch::optim::Adafactor. The second moment of a matrix is kept by
/// rows and columns only. The length of an update depends on the mean squares of the parameter and
/// of the update.
struct Adafactor {
  double lr = 1e-2;           ///< the rate; with a relative step, its upper limit
  double beta2_decay = -0.8;  ///< the share of a new square in step t is t to this power
  /// Without `eps_added`: eps1 * eps1 is the lower limit of a second moment, and eps1 itself that
  /// of the mean over a factored matrix. With `eps_added`: eps1 is added to squares. If it is not
  /// set, it is 2^-23, or 1e-30 with `eps_added`.
  std::optional<double> eps1{};
  double eps2 = 1e-3;         ///< lower limit of the root of a parameter's mean square
  double d = 1.0;             ///< upper limit of the root of an update's mean square
  double weight_decay = 0.0;  ///< decoupled; it is multiplied by `lr` alone
  /// The rate is multiplied by the root of the parameter's mean square.
  bool scale_parameter = true;
  bool relative_step = true;  ///< the rate of step t is at most 1 / sqrt(t)
  bool warmup_init = false;   ///< the rate of step t is also at most t / 1000000
  bool eps_added = false;     ///< see eps1; the paper and transformers add it
  /// If true, second moments are kept by rows and columns, otherwise one for each element. The
  /// engine factors only parameters of two dimensions or more (optim::suited).
  bool factored = true;
  double first_eps() const { return eps1.value_or(eps_added ? 1e-30 : 0x1p-23); }
  bool operator==(const Adafactor&) const = default;
  static const optim::Algorithm<Adafactor>& algorithm();
};

/// Schedule-free AdamW (2405.15682), as schedulefree.AdamWScheduleFree: no schedule lowers the
/// rate, since a mean of all iterates takes its place. Gradients are taken at y, which are the
/// weights of training, and step t moves z. The weights for evaluation are x, the mean of the z:
/// x_t = (1 - c_t) x_(t-1) + c_t z_t, and y_t = (1 - beta1) z_t + beta1 x_t. With w_t = min(1, t /
/// warmup_steps)^2 the share c_t is w_t over the sum of w_1 to w_t. Only y and z are kept
/// (optim::evaluated, Engine::optimizer_eval).
struct ScheduleFreeAdamW {
  double lr = 2.5e-3;
  double beta1 = 0.9;  ///< above 0, since x is computed from y and z
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  ///< decoupled, of y
  /// The rate of step t is lr * min(1, t / warmup_steps). None is 0, but `zero train` then takes
  /// its own warm-up. A warm-up that `Engine::set_lr` makes instead does not count in the shares.
  std::optional<int64_t> warmup_steps{};
  bool operator==(const ScheduleFreeAdamW&) const = default;
  static const optim::Algorithm<ScheduleFreeAdamW>& algorithm();
};

using Optimizer =
    std::variant<AdamW, Sgd, Adagrad, Lion, Lamb, Muon, Adafactor, ScheduleFreeAdamW, Apollo>;

namespace optim {

/// The most state arrays that an optimizer has besides the master weights.
inline constexpr size_t kMostStates = 2;

/// Returns the names of the fp32 state arrays besides the master weights, as checkpoints use them:
/// AdamW {"exp_avg", "exp_avg_sq"}; Sgd {"momentum_buffer"}, or {} without momentum; Adagrad
/// {"sum"}; Lion {"exp_avg"}; Lamb as AdamW; Muon {"momentum_buffer"}; Adafactor {"variance"}, or
/// {} if it is factored (factors.h); ScheduleFreeAdamW {"z", "exp_avg_sq"}; Apollo {}.
std::vector<std::string_view> state_names(const Optimizer& optimizer);

/// A state of a parameter that has another number of elements than the parameter.
struct FactoredState {
  std::string_view name;
  std::vector<int64_t> sizes;
  bool operator==(const FactoredState&) const = default;
};
/// The names of all such states.
inline constexpr std::array<std::string_view, 5> kFactoredStates{
    "row_var", "col_var", "exp_avg_low_rank", "exp_avg_sq_low_rank", "update_norm"};
/// Returns those of a dense parameter, whose optimizer is `suited` to it: of factored Adafactor
/// {"row_var", "col_var"}, in PyTorch's shapes; of Apollo for a matrix that has elements
/// {"exp_avg_low_rank", "exp_avg_sq_low_rank"} of (channels, rank), and {"update_norm"} of (1).
std::vector<FactoredState> factored_states(const Optimizer& optimizer, c10::IntArrayRef sizes,
                                           c10::IntArrayRef strides);

/// Returns the signs that the values of each state may have: squares are never negative.
std::array<Sign, kMostStates> state_signs(const Optimizer& optimizer);

/// Returns the name of an optimizer in configuration files, such as "AdamW".
std::string_view name(const Optimizer& optimizer);

/// Returns the rate that an update number `step` (1 for the first) has in force, where `lr` is that
/// of the schedule: an optimizer may warm up by itself.
double rate_in_force(const Optimizer& optimizer, double lr, int64_t step);

/// Returns k if the weights for evaluation are p + k (s - p), with the weights p that are trained
/// and the first state s; nothing if they are p. A parameter without updates so far has no s yet.
std::optional<double> evaluated(const Optimizer& optimizer);

/// Returns the learning rate of an optimizer.
double lr(const Optimizer& optimizer);
/// Returns the same optimizer without weight decay.
Optimizer without_decay(Optimizer optimizer);

/// The arrays of an update for a contiguous part of one parameter: all pointers point to
/// `numel` elements, and no
/// two arrays overlap.
struct Operands {
  int64_t numel = 0;
  /// All arrays lie here. On a device an update is enqueued on this thread's current stream
  /// (operators.h).
  c10::Device device{c10::kCPU};
  float* master = nullptr;    ///< fp32 weights, updated in place; null if `lower` is set
  uint16_t* lower = nullptr;  ///< their lower halves: Note [Split master weights] in halves.h
  std::array<float*, kMostStates> state{};  ///< the states in the order of state_names(); else null
  const void* gradient = nullptr;           ///< of `gradient_dtype`: Float, BFloat16 or Half
  c10::ScalarType gradient_dtype = c10::ScalarType::Float;
  /// A scaled gradient above this limit, or below its negative, is replaced by it.
  float gradient_limit = std::numeric_limits<float>::infinity();
  /// The low-precision copy of the weights, or null if the master is the parameter. With `lower` it
  /// is the upper halves, which are updated in place.
  void* parameter = nullptr;
  c10::ScalarType parameter_dtype =
      c10::ScalarType::Float;  ///< BFloat16 or Half when `parameter` is set; BFloat16 with `lower`
};

/// Throws a ConfigError that names the first hyper-parameter of `optimizer` that cannot be used (a
/// negative rate, beta1 = 1, ...).
void check(const Optimizer& optimizer);

/// Returns the optimizer for a parameter of this many dimensions: Adafactor is not factored if
/// there are fewer than two.
Optimizer suited(Optimizer optimizer, int64_t dimensions);

/// Applies update number `step` (1 for the first) to `operands`. `lr` replaces the optimizer's own
/// rate, so that schedules apply. Uses LibTorch's intra-op threads. Vectorised with run-time
/// dispatch. Throws a ConfigError for a dtype that Operands may not have. For Lamb, and for
/// Adafactor that is not factored, `operands` must be those of a whole parameter. Updates of
/// matrices (Muon, Apollo, factored Adafactor) do not take operands: see sweeps.h.
void update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
            const Operands& operands);

/// Does the same as `update` in plain loops, one element at a time. Tests compare `update` with it
/// in bits.
void update_reference(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                      const Operands& operands);

/// Elements in double, as Operands have them in fp32. `gradient` is already scaled.
struct ExactOperands {
  int64_t numel = 0;
  double* weights = nullptr;
  std::array<double*, kMostStates> state{};
  const double* gradient = nullptr;
};
/// Computes the same formulas in double. Tests compare other implementations with it.
void update_exact(const Optimizer& optimizer, int64_t step, double lr,
                  const ExactOperands& operands);

/// Split `numel` fp32 values into halves (`lower` may be null), and join them again: Note [Split
/// master weights]. Both use LibTorch's intra-op threads.
void split(const float* values, uint16_t* upper, uint16_t* lower, int64_t numel);
void join(const uint16_t* upper, const uint16_t* lower, float* values, int64_t numel);
/// Sets lower halves to 0 where they do not fit upper halves that something else has written.
void fit_lower(const uint16_t* upper, uint16_t* lower, int64_t numel);

/// The sum of squares of `numel` elements (Float, BFloat16 or Half) in fp64, and whether all
/// elements are finite. The order of summation depends on `numel` alone (fixed blocks, added in
/// order), and not on threads, alignment or instruction set.
struct SquaredNorm {
  double sum = 0;
  bool finite = true;
};
SquaredNorm squared_norm(const void* values, c10::ScalarType dtype, int64_t numel);
SquaredNorm squared_norm_reference(const void* values, c10::ScalarType dtype, int64_t numel);

/// Adds `source` (Float, BFloat16 or Half) to `destination` (fp32), element by element.
void accumulate(float* destination, const void* source, c10::ScalarType source_dtype,
                int64_t numel);
void accumulate_reference(float* destination, const void* source, c10::ScalarType source_dtype,
                          int64_t numel);

}  // namespace optim
}  // namespace zero
