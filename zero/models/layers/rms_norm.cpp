#include "zero/models/layers/rms_norm.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "zero/base/gradient_place.h"

namespace zero {
namespace {

// Returns 1 / sqrt(mean(x^2) + eps) of each row, of x in fp32.
at::Tensor inverse_root(const at::Tensor& x, double eps) {
  return at::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true).add(eps));
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, double eps, bool and_one) {
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["and_one"] = and_one;
    const auto wide = x.to(at::kFloat);
    const auto normed = wide * inverse_root(wide, eps);
    return and_one ? (normed * (weight.to(at::kFloat) + 1)).to(x.scalar_type())
                   : weight * normed.to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const bool and_one = context->saved_data.at("and_one").toBool();
    const auto dy = and_one ? gradients[0].to(at::kFloat) : gradients[0];
    const auto wide = x.to(at::kFloat);
    const auto root = inverse_root(wide, context->saved_data.at("eps").toDouble());
    const auto normed = wide * root;
    at::Tensor dx;
    at::Tensor dweight;
    if (context->needs_input_grad(1)) {
      const auto sums = (dy * normed.to(dy.scalar_type()))
                            .reshape({-1, weight.size(0)})
                            .sum(0, false, at::kFloat);
      if (at::GradMode::is_enabled()) {
        dweight = sums.to(weight.scalar_type());
      } else {
        dweight = gradient_place(weight);
        dweight.copy_(sums);
      }
    }
    if (context->needs_input_grad(0)) {
      const auto inner = and_one ? dy * (weight.to(at::kFloat) + 1) : (dy * weight).to(at::kFloat);
      dx = (root * (inner - normed * (inner * normed).mean(-1, true))).to(x.scalar_type());
    }
    return {std::move(dx), std::move(dweight), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormScale scale) {
  return RmsNormFunction::apply(x, weight, eps, scale == NormScale::weight_and_one);
}

void RmsNormImpl::reset() {
  const double first = scale_ == NormScale::weight_and_one ? 0 : 1;
  weight = register_parameter("weight", at::full({width_}, first));
}

}  // namespace zero
