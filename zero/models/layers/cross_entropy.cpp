#include "zero/models/layers/cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/observed.h"
#include "zero/base/traced.h"
#include "zero/base/weight_use.h"
#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/matmul.h"
#include "zero/models/layers/softmax.h"

namespace zero {
namespace {

// Note [Rows of a chunk]
// Each chunk re-reads the weight (V, C) and, for the gradient, re-reads and re-writes the weight's
// gradient: three passes over V * C elements against 6 * rows * V * C operations. Few rows make the
// step memory-bound, many rows make the logits large. 64 MiB of fp32 logits is 333 rows of GPT-2's
// vocabulary, some 500 operations for each byte moved, far above any processor's ratio of the two;
// the rows are then spread evenly over the chunks, so that no small remainder is left. A GPU makes
// 250 operations in the time of a byte, and needs many rows to have work for all of its processors:
// 1 GiB, of which logits in 16 bits take half, is 5300 of these rows.
int64_t rows_of_chunk(const at::Tensor& hidden, int64_t vocabulary, int64_t logits_bytes) {
  const int64_t rows = hidden.size(0);
  if (logits_bytes == 0) logits_bytes = on_cpu(hidden) ? kLogitsBytes : kDeviceLogitsBytes;
  const int64_t limit = std::max<int64_t>(1, logits_bytes / (4 * vocabulary));
  const int64_t chunks = std::max<int64_t>(1, at::ceil_div(rows, limit));
  return std::max<int64_t>(1, at::ceil_div(rows, chunks));
}

// Says whose gradients are asked for.
struct Needs {
  bool hidden = false;
  bool weight = false;
  bool bias = false;
};

struct LossAndGradients {
  at::Tensor loss;    // () fp32
  at::Tensor hidden;  // (N, C), undefined when not needed
  at::Tensor weight;  // (V, C), undefined when not needed
  at::Tensor bias;    // (V), undefined when not needed
  /// Gradients of the logits by chunks of rows, if those of `hidden` and `weight` are for backward.
  std::vector<at::Tensor> logits;
};

// Returns the weight or the bias in `dtype`, with rows of zeros at its end: Note [A vocabulary of a
// multiple of 64]. The logits of those rows are zero, are in no view that the loss sees, and stay
// zero, so that they change neither sum.
at::Tensor padded(const at::Tensor& weight, at::ScalarType dtype, int64_t rows) {
  // No operator runs where there is nothing to do: profilers count what touches a parameter.
  if (rows == weight.size(0)) return weight.scalar_type() == dtype ? weight : weight.to(dtype);
  auto sizes = weight.sizes().vec();
  sizes[0] = rows;
  auto whole = at::empty(sizes, weight.options().dtype(dtype));
  whole.narrow(0, 0, weight.size(0)).copy_(weight);
  whole.narrow(0, weight.size(0), rows - weight.size(0)).zero_();
  return whole;
}

// Note [Logits in blocks]
// At stage 3 between hosts the weight of an output projection arrives while the last layers are
// computed, and is the last to arrive. This rank's own rows are here at once. Their logits are
// computed while the others are on their way (use_weight); those of the others follow. The bits of
// a product may depend on its shape, so on the CPU the logits are always computed kTileRows tokens
// of the vocabulary at a time, wherever the rows come from. A block that has rows of two owners
// waits for both. On an EPYC the blocks have the bits of the whole product, by oneDNN (bf16, fp32)
// and by MKL (fp32), and take as long to 1 %; in fp32 they take 3 % less.
at::Tensor logits_of(const at::Tensor& x, const at::Tensor& weight) {
  if (!on_cpu(x)) return product(x, weight.t());
  const int64_t vocabulary = weight.size(0);
  auto logits = at::empty({x.size(0), vocabulary}, x.options());
  // Makes those of the blocks from `begin` to `end`. `rows` begin with the row `first`.
  const auto make = [&](const at::Tensor& rows, int64_t first, int64_t begin, int64_t end) {
    for (; begin < end; begin += kTileRows) {
      const int64_t size = std::min(kTileRows, end - begin);
      const auto block = rows.narrow(0, begin - first, size).t();
      auto to = logits.narrow(1, begin, size);
      if (x.scalar_type() == at::kFloat) {
        to.copy_(product(x, block));  // by the faster library: Note [Which library multiplies]
      } else {
        product_into(to, x, block);
      }
    }
  };
  int64_t early = 0, late = 0;  // the blocks from `early` to `late` are made
  use_weight(
      weight,
      [&](const WeightRows& here) -> int64_t {
        const int64_t end = here.begin + here.rows.size(0);
        early = at::ceil_div(here.begin, kTileRows) * kTileRows;
        late = std::max(early, end == vocabulary ? end : end / kTileRows * kTileRows);
        if (early == late) return early = late = 0;  // there is no whole block
        make(here.rows, here.begin, early, late);
        return late - early;
      },
      [&] {
        make(weight, 0, 0, early);
        make(weight, 0, late, vocabulary);
      });
  return logits;
}

// Computes result (rows, C) = logits (rows, V) x weight (V, C).
void gradient_of_hidden(at::Tensor result, const at::Tensor& logits, const at::Tensor& weight) {
  if (on_cpu(result)) {
    result.copy_(product(logits, weight));
  } else {
    product_into(result, logits, weight);
  }
}

// Computes tile (n, C) += logits^T (n, rows) x (rows, C), or = for the first rows, of the n tokens
// from `begin` on.
void add_outer_tile(at::Tensor tile, int64_t begin, const at::Tensor& logits, const at::Tensor& x,
                    bool first) {
  const auto columns = logits.narrow(1, begin, tile.size(0)).t();
  // The first product writes, the others add: no zero fill.
  if (tile.scalar_type() != x.scalar_type()) {  // fp32, of a weight that was cast
    const auto part = product(columns, x);
    first ? tile.copy_(part) : tile.add_(part);
  } else if (first) {
    product_into(tile, columns, x);
  } else {
    add_product(tile, columns, x);
  }
}

// Computes the same for the whole weight (V, C). On the CPU in tiles: oneDNN, which multiplies
// bf16, is a sixth slower where one dimension is very long.
void add_outer(const at::Tensor& weight, const at::Tensor& logits, const at::Tensor& x,
               bool first) {
  const int64_t most = on_cpu(x) ? kTileRows : weight.size(0);
  for (int64_t begin = 0; begin < weight.size(0); begin += most) {
    const int64_t size = std::min(most, weight.size(0) - begin);
    add_outer_tile(weight.narrow(0, begin, size), begin, logits, x, first);
  }
}

LossAndGradients compute(const at::Tensor& hidden, const at::Tensor& parameter,
                         const at::Tensor& bias_parameter, const at::Tensor& targets, Needs need,
                         const LinearCrossEntropyOptions& settings, double factor) {
  // Another dtype: under autocast.
  const auto weight = padded(parameter, hidden.scalar_type(), padded_rows(parameter));
  const auto bias = bias_parameter.defined()
                        ? padded(bias_parameter, hidden.scalar_type(), weight.size(0))
                        : at::Tensor();
  const int64_t rows = hidden.size(0);
  const int64_t vocabulary = parameter.size(0);
  const auto options = hidden.options();
  const bool need_gradient = need.hidden || need.weight || need.bias;
  const bool later = settings.weight_in_backward && need.weight && rows > 0 && on_cpu(hidden) &&
                     weight.is_same(parameter);
  if (later) need.hidden = need.weight = false;

  LossAndGradients out;
  if (need.hidden) out.hidden = at::empty(hidden.sizes(), options);
  if (need.bias) out.bias = at::zeros({weight.size(0)}, options.dtype(at::kFloat));
  if (need.weight) {
    out.weight = at::empty({0}, parameter.options());
    if (settings.weight_slot.defined()) out.weight.set_(settings.weight_slot.storage());
    out.weight.resize_(weight.sizes());
    if (rows == 0) out.weight.zero_();
  }

  const auto counted = targets.ne(kIgnoredTarget);
  const auto count = settings.divisor > 0
                         ? at::full({}, settings.divisor, options.dtype(at::kDouble))
                         : counted.sum().to(at::kDouble);
  // A row's gradient is (softmax - onehot) * row_scale: factor / count, and 0 for an ignored row.
  const auto row_scale =
      counted.to(at::kFloat).mul_(factor).div_(settings.divisor > 0 ? count : count.clamp_min(1));
  auto sum = at::zeros({}, options.dtype(at::kDouble));

  const int64_t step = rows_of_chunk(hidden, vocabulary, settings.logits_bytes);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t size = std::min(step, rows - begin);
    const auto x = hidden.narrow(0, begin, size);
    const auto logits = bias.defined() ? at::addmm(bias, x, weight.t()) : logits_of(x, weight);
    auto seen = logits.narrow(1, 0, vocabulary);
    sum += softmax_cross_entropy_(seen, targets.narrow(0, begin, size),
                                  row_scale.narrow(0, begin, size), need_gradient,
                                  settings.label_smoothing);
    if (!need_gradient) continue;
    if (later) out.logits.push_back(logits);
    // Shown by a name: to who counts what forward does, it is a part of backward.
    const std::array<at::Tensor, 0> none;
    observed("zero::linear_cross_entropy_gradient", none, none, [&] {
      if (need.hidden) gradient_of_hidden(out.hidden.narrow(0, begin, size), logits, weight);
      if (need.weight) add_outer(out.weight, logits, x, begin == 0);
      if (!need.bias) return;
      auto sums = at::empty_like(out.bias);
      column_sums_into(sums, logits);
      out.bias.add_(sums);
    });
  }
  if (need.weight) out.weight.resize_(parameter.sizes());  // without the rows at its end
  if (need.bias) out.bias = out.bias.narrow(0, 0, vocabulary).to(bias_parameter.scalar_type());
  out.loss = sum.div_(count).to(at::kFloat);
  return out;
}

// Multiplies in place: the gradient belongs to the function alone, and has `factor` in it already.
at::Tensor scaled(at::Tensor gradient, const at::Tensor& scale, double factor) {
  if (!gradient.defined()) return gradient;
  // On a device, reading the scale would stall the stream for longer than the product takes.
  if (scale.is_cpu() && scale.item<double>() == factor) return gradient;
  return gradient.mul_((scale / factor).to(gradient.scalar_type()));
}

// Gives away the gradient of the weight from those of the logits: in tiles to the collector where
// it takes them, or else whole to the slot or to the caller.
at::Tensor weight_from_logits(const std::vector<at::Tensor>& logits, const at::Tensor& hidden,
                              const at::Tensor& weight, bool has_slot, const at::Tensor& scale,
                              double factor) {
  const auto make = [&](int64_t begin, const at::Tensor& tile) {
    int64_t row = 0;
    for (const auto& chunk : logits) {
      const auto x = hidden.narrow(0, row, chunk.size(0));
      add_outer_tile(tile, begin, chunk, x, row == 0);
      row += chunk.size(0);
    }
    scaled(tile, scale, factor);
  };
  if (auto* taker = has_slot ? gradient_taker(weight) : nullptr) {
    taker->take(make);
    return {};
  }
  auto whole = at::empty(weight.sizes(), hidden.options());
  for (int64_t begin = 0; begin < whole.size(0); begin += kTileRows)
    make(begin, whole.narrow(0, begin, std::min(kTileRows, whole.size(0) - begin)));
  return whole;
}

at::Tensor hidden_from_logits(const std::vector<at::Tensor>& logits, const at::Tensor& hidden,
                              const at::Tensor& weight, const at::Tensor& scale, double factor) {
  auto gradient = at::empty(hidden.sizes(), hidden.options());
  int64_t row = 0;
  for (const auto& chunk : logits) {
    gradient_of_hidden(gradient.narrow(0, row, chunk.size(0)), chunk, weight);
    row += chunk.size(0);
  }
  return scaled(std::move(gradient), scale, factor);
}

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& targets, const Needs& need,
                            const LinearCrossEntropyOptions& options) {
    // In fp16 they would underflow without the loss scale, which is known already.
    const double factor = static_cast<float>(loss_factor(weight));
    auto result =
        compute(hidden, weight, bias.value_or(at::Tensor()), targets, need, options, factor);
    // This does not use save_for_backward: a saved variable is shared and versioned, and these are
    // ours to scale in place and give away.
    context->saved_data["hidden"] = std::move(result.hidden);
    context->saved_data["weight"] = std::move(result.weight);
    context->saved_data["bias"] = std::move(result.bias);
    context->saved_data["slot"] = options.weight_slot;
    context->saved_data["factor"] = factor;
    if (!result.logits.empty()) {
      context->saved_data["logits"] = std::move(result.logits);
      context->saved_data["input"] = hidden.detach();
      context->saved_data["parameter"] = weight;
      context->saved_data["need hidden"] = need.hidden;
    }
    return result.loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& saved = context->saved_data;
    if (saved.empty()) {
      throw Error(
          "backward ran a second time through linear_cross_entropy, which gives its gradients away "
          "in the first. Compute the loss again, or use at::cross_entropy_loss on the logits.");
    }
    if (at::GradMode::is_enabled()) {
      throw Error(
          "linear_cross_entropy has no second derivative (backward ran with create_graph). Use "
          "at::cross_entropy_loss on the logits.");
    }
    auto hidden = saved.at("hidden").toTensor();
    const double factor = saved.at("factor").toDouble();
    auto weight = scaled(saved.at("weight").toTensor(), gradients[0], factor);
    auto bias = scaled(saved.at("bias").toTensor(), gradients[0], factor);
    auto slot = saved.at("slot").toTensor();
    if (const auto kept = saved.find("logits"); kept != saved.end()) {
      const auto logits = kept->second.toTensorVector();
      const auto input = saved.at("input").toTensor();
      const auto parameter = saved.at("parameter").toTensor();
      const std::array<at::Tensor, 0> none;
      observed("zero::linear_cross_entropy_gradient", none, none, [&] {
        weight = weight_from_logits(logits, input, parameter, slot.defined(), gradients[0], factor);
        if (saved.at("need hidden").toBool())
          hidden = hidden_from_logits(logits, input, parameter, gradients[0], factor);
      });
      gradients[0] = at::full({}, factor);  // they are scaled
    }
    saved.clear();
    if (slot.defined() && weight.defined()) slot.set_data(std::exchange(weight, at::Tensor()));
    return {scaled(std::move(hidden), gradients[0], factor),
            std::move(weight),
            std::move(bias),
            {},
            {},
            {}};
  }
};

// Throws for numbers, shapes and dtypes that do not fit. A weight that is `cast` may have another
// dtype.
void check(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets, bool cast,
           const LinearCrossEntropyOptions& options) {
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    throw ConfigError(
        fmt::format("linear_cross_entropy takes a label_smoothing from 0 to 1, not {}.",
                    options.label_smoothing));
  }
  if (!(options.divisor >= 0)) {
    throw ConfigError(fmt::format(
        "linear_cross_entropy takes a divisor above 0, or 0 for the number of rows with a target, "
        "not {}.",
        options.divisor));
  }
  if (options.logits_bytes < 0) {
    throw ConfigError(
        fmt::format("linear_cross_entropy takes logits_bytes above 0, or 0 for the size that suits "
                    "the device, not {}.",
                    options.logits_bytes));
  }
  const auto shape = [](const at::Tensor& tensor) {
    return fmt::format("({})", fmt::join(tensor.sizes(), ", "));
  };
  if (hidden.dim() != 2 || weight.dim() != 2 || targets.dim() != 1 ||
      hidden.size(1) != weight.size(1) || hidden.size(0) != targets.size(0)) {
    throw ConfigError(
        fmt::format("linear_cross_entropy takes hidden (N, C), weight (V, C) and targets (N), not "
                    "{}, {} and {}.",
                    shape(hidden), shape(weight), shape(targets)));
  }
  const auto& bias = options.bias;
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0) ||
                         bias.scalar_type() != weight.scalar_type())) {
    throw ConfigError(fmt::format(
        "linear_cross_entropy takes a bias (V) of the weight's dtype, and the weight is "
        "{} of {}, the bias {} of {}.",
        c10::toString(weight.scalar_type()), shape(weight), c10::toString(bias.scalar_type()),
        shape(bias)));
  }
  const bool goes_along =
      cast ? autocast_dtype(weight).has_value() : hidden.scalar_type() == weight.scalar_type();
  const auto dtype = hidden.scalar_type();
  const bool computes = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!goes_along || !computes || targets.scalar_type() != at::kLong) {
    throw ConfigError(
        fmt::format("linear_cross_entropy takes hidden and weight of one dtype (Float, BFloat16 or "
                    "Half) and targets of Long, not {}, {} and {}.",
                    c10::toString(hidden.scalar_type()), c10::toString(weight.scalar_type()),
                    c10::toString(targets.scalar_type())));
  }
  const auto& slot = options.weight_slot;
  if (slot.defined() &&
      (slot.scalar_type() != weight.scalar_type() || slot.device() != weight.device() ||
       (slot.numel() > 0 && slot.sizes() != weight.sizes()))) {
    throw ConfigError(fmt::format(
        "linear_cross_entropy takes a weight_slot that is empty, or of the weight's shape, and of "
        "its dtype; the weight is {} of {}, the slot {} of {}. Give at::empty({{0}}, "
        "weight.options()).",
        c10::toString(weight.scalar_type()), shape(weight), c10::toString(slot.scalar_type()),
        shape(slot)));
  }
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  const auto dtype = hidden.defined() ? autocast_dtype(hidden) : std::nullopt;
  const auto cast = dtype ? hidden.to(*dtype) : hidden;
  check(cast, weight, targets, dtype.has_value(), options);
  const bool grad = at::GradMode::is_enabled();
  const Autocast no_more(std::nullopt, hidden.device().type());
  const auto asked = [&](const at::Tensor& of) {
    return grad && of.defined() && of.requires_grad();
  };
  const auto bias = options.bias.defined() ? std::optional(options.bias) : std::nullopt;
  return LinearCrossEntropy::apply(cast, weight, bias, targets,
                                   Needs{asked(hidden), asked(weight), asked(options.bias)},
                                   options);
}

}  // namespace zero
