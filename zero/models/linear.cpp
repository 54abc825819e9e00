#include "zero/models/linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "zero/base/gradient_place.h"
#include "zero/models/matmul.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor in_out(const at::Tensor& weight, bool transposed) {
  return transposed ? weight.t() : weight;
}

class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool transposed) {
    variable_list saved{x, weight};
    if (bias) saved.push_back(*bias);
    context->save_for_backward(std::move(saved));
    context->saved_data["transposed"] = transposed;
    return product(x, in_out(weight, transposed), bias.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const bool biased = saved.size() > 2;
    const bool transposed = context->saved_data.at("transposed").toBool();
    const bool differentiable = at::GradMode::is_enabled();  // of second order
    const auto dy = gradients[0].contiguous();
    at::Tensor dx;
    at::Tensor dw;
    at::Tensor db;
    if (context->needs_input_grad(0)) {
      const auto b = in_out(weight, !transposed);
      dx = differentiable ? at::mm(dy, b) : product(dy, b);
    }
    if (context->needs_input_grad(1)) {
      const auto a = transposed ? dy.t() : x.t();
      const auto& b = transposed ? x : dy;
      if (differentiable) {
        dw = at::mm(a, b);
      } else {
        dw = gradient_place(weight);
        at::mm_out(dw, a, b);
      }
    }
    if (biased && context->needs_input_grad(2)) {
      if (differentiable) {
        db = dy.sum(0);
      } else {
        db = gradient_place(saved[2]);
        at::sum_out(db, dy, {0});
      }
    }
    return {dx, dw, db, at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout) {
  const bool transposed = layout == WeightLayout::out_in;
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(transposed ? 0 : 1);
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  return Linear::apply(x.reshape({-1, x.size(-1)}), weight, optional_bias, transposed).view(sizes);
}

}  // namespace zero
