#include "zero/models/layers/linear.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/linear_gradients.h"
#include "zero/models/layers/matmul.h"
#include "zero/models/layers/packed_weight.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Keeps what both functions below need from forward to backward: `x` may be undefined.
void keep(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
          const std::optional<at::Tensor>& bias, bool transposed) {
  variable_list saved{x, weight};
  if (bias) saved.push_back(*bias);
  context->save_for_backward(std::move(saved));
  context->saved_data["transposed"] = transposed;
}

struct Kept {
  explicit Kept(AutogradContext* context) {
    const auto saved = context->get_saved_variables();
    x = saved[0];
    weight = saved[1];
    if (saved.size() > 2) bias = saved[2];
    transposed = context->saved_data.at("transposed").toBool();
    wanted = {context->needs_input_grad(0), context->needs_input_grad(1),
              bias.defined() && context->needs_input_grad(2)};
  }
  at::Tensor x, weight, bias;  // x and the bias may be undefined
  bool transposed = false;
  WantedGradients wanted;
};

class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool transposed) {
    // A frozen weight has no gradient, which is all that needs x: nothing keeps it.
    keep(context, weight.requires_grad() ? x : at::Tensor(), weight, bias, transposed);
    return product(x, as_in_out(in_dtype_of(x, weight), transposed),
                   in_dtype_of(x, bias.value_or(at::Tensor())));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Kept kept(context);
    const auto& [x, weight, bias, transposed, wanted] = kept;
    const auto dy = gradients[0].contiguous();
    if (at::GradMode::is_enabled()) {  // of second order
      const auto dtype = weight.scalar_type();
      return {wanted.x ? at::mm(dy, as_in_out(in_dtype_of(dy, weight), !transposed)) : at::Tensor(),
              !wanted.weight ? at::Tensor()
              : transposed   ? at::mm(dy.t(), x).to(dtype)
                             : at::mm(x.t(), dy).to(dtype),
              wanted.bias ? dy.sum(0).to(dtype) : at::Tensor(), at::Tensor()};
    }
    const auto of = linear_gradients(dy, x, weight, bias, transposed, wanted);
    return {of.x, of.weight, of.bias, at::Tensor()};
  }
};

class GeluLinear : public torch::autograd::Function<GeluLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool transposed) {
    keep(context, x, weight, bias, transposed);
    const auto y = tanh_gelu_values(x);
    return product(y, as_in_out(in_dtype_of(x, weight), transposed),
                   in_dtype_of(x, bias.value_or(at::Tensor())));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error(
          "gelu_linear has no second derivative (backward ran with create_graph). Use tanh_gelu "
          "and linear.");
    }
    const Kept kept(context);
    const auto [x, weight, bias, transposed, wanted] = kept;
    const auto dy = gradients[0].contiguous();
    // First the gradient of what the layer multiplies, beside whose own way back the values come
    // again, of which the weight's gradient is made.
    auto of =
        linear_gradients(dy, {}, weight, bias, transposed, {.x = wanted.x, .bias = wanted.bias});
    if (!wanted.weight) {
      if (wanted.x) tanh_gelu_gradient(x, of.x, of.x);
    } else {
      const auto y = wanted.x ? tanh_gelu_again(x, of.x) : tanh_gelu_values(x);
      of.weight = linear_gradients(dy, y, weight, bias, transposed, {.weight = true}).weight;
    }
    return {of.x, of.weight, of.bias, at::Tensor()};
  }
};

/// A frozen matrix that is kept in bytes.
struct PackedFactor {
  BaseFormat format;
  int64_t in, out;
  bool transposed;  // it lies as (out, in)

  // (in, out)
  at::Tensor read(const at::Tensor& packed, at::ScalarType dtype) const {
    return transposed ? unpacked_weight(packed, format, out, in, dtype).t()
                      : unpacked_weight(packed, format, in, out, dtype);
  }
};

/// Multiplies by a frozen matrix that is kept in bytes.
class PackedLinear : public torch::autograd::Function<PackedLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& packed,
                            const std::optional<at::Tensor>& bias, int64_t format, int64_t out,
                            bool transposed) {
    keep(context, {}, packed, bias, transposed);
    context->saved_data["format"] = format;
    context->saved_data["in"] = x.size(1);
    context->saved_data["out"] = out;
    return product(x, factor(context).read(packed, x.scalar_type()),
                   in_dtype_of(x, bias.value_or(at::Tensor())));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Kept kept(context);
    const auto dy = gradients[0].contiguous();
    variable_list of(6);
    if (kept.wanted.x) {
      const auto back = factor(context).read(kept.weight, dy.scalar_type()).t();
      of[0] = at::GradMode::is_enabled() ? at::mm(dy, back) : product(dy, back);
    }
    if (kept.wanted.bias && at::GradMode::is_enabled()) {
      of[2] = dy.sum(0).to(kept.bias.scalar_type());
    } else if (kept.wanted.bias) {
      of[2] = gradient_place(kept.bias);
      column_sums_into(of[2], dy);
    }
    return of;
  }

 private:
  static PackedFactor factor(const AutogradContext* context) {
    const auto& saved = context->saved_data;
    return {.format = static_cast<BaseFormat>(saved.at("format").toInt()),
            .in = saved.at("in").toInt(),
            .out = saved.at("out").toInt(),
            .transposed = saved.at("transposed").toBool()};
  }
};

// Throws unless all have one dtype; autocast casts fp32 and 16 bits alone.
void check_dtypes(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  std::optional<at::ScalarType> cast) {
  const auto suits = [&](const at::Tensor& tensor) {
    return !tensor.defined() ||
           (cast ? autocast_dtype(tensor).has_value() : tensor.scalar_type() == x.scalar_type());
  };
  if (suits(weight) && suits(bias)) return;
  throw ConfigError(fmt::format(
      "A linear layer was given x in {}, a weight in {} and {}: they must have one dtype, or be "
      "Float, BFloat16 or Half in a zero::Autocast scope.",
      c10::toString(x.scalar_type()), c10::toString(weight.scalar_type()),
      bias.defined() ? fmt::format("a bias in {}", c10::toString(bias.scalar_type()))
                     : std::string("no bias")));
}

std::optional<at::Tensor> optional_of(const at::Tensor& bias) {
  return bias.defined() ? std::optional(bias) : std::nullopt;
}

// Calls apply(rows) with (..., in) as (rows, in), cast; returns what comes of it as (..., out).
template <class Apply>
at::Tensor by_rows(const at::Tensor& x, int64_t out, std::optional<at::ScalarType> dtype,
                   const Apply& apply) {
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  const auto rows = x.reshape({-1, x.size(-1)}).contiguous();
  // Inside everything has the dtype that it shall have.
  const auto cast = dtype ? rows.to(*dtype) : rows;
  const Autocast no_more(std::nullopt, x.device().type());
  return apply(cast).view(sizes);
}

template <class Function>
at::Tensor by_whole_weight(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           WeightLayout layout) {
  const bool transposed = layout == WeightLayout::out_in;
  const auto dtype = autocast_dtype(x);
  check_dtypes(x, weight, bias, dtype);
  return by_rows(x, weight.size(transposed ? 0 : 1), dtype, [&](const at::Tensor& rows) {
    return Function::apply(rows, weight, optional_of(bias), transposed);
  });
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout) {
  return by_whole_weight<Linear>(x, weight, bias, layout);
}

at::Tensor gelu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       WeightLayout layout) {
  const auto dtype = autocast_dtype(x);
  const auto cast = dtype ? x.to(*dtype) : x;
  if (!has_tanh_gelu_kernel(cast)) return linear(tanh_gelu(cast), weight, bias, layout);
  return by_whole_weight<GeluLinear>(cast, weight, bias, layout);
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, BaseFormat format,
                         int64_t out, const at::Tensor& bias, WeightLayout layout) {
  const auto dtype = autocast_dtype(x);
  if (bias.defined()) check_dtypes(x, bias, bias, dtype);
  return by_rows(x, out, dtype, [&](const at::Tensor& rows) {
    return PackedLinear::apply(rows, packed, optional_of(bias), static_cast<int64_t>(format), out,
                               layout == WeightLayout::out_in);
  });
}

}  // namespace zero
