#include "zero/models/layers/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/traced.h"
#include "zero/models/layers/device_kernel.h"

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

constexpr const char *kRmsNorm = "zero::rms_norm", *kRmsNormBackward = "zero::rms_norm_backward";

// Kernels take rows of these widths; a narrow row gives a block too little to do.
constexpr int64_t kMostOfRow = 8192, kFewestOfRow = 256, kMultipleOfRow = 8;

bool has_rms_kernel(const at::Tensor& x, const at::Tensor& weight) {
  if (on_cpu(x) || autocast_dtype(x) || x.dim() == 0) return false;
  const auto columns = x.size(-1);
  const auto dtype = x.scalar_type();
  const int64_t most = dtype == at::kFloat ? kMostOfRow / 2 : kMostOfRow;
  const bool suits = columns >= kFewestOfRow && columns <= most && columns % kMultipleOfRow == 0 &&
                     weight.scalar_type() == dtype && has_kernel_dtype(x);
  return suits && has_device_kernel(x, kRmsNormBackward);
}

using Branch = std::optional<at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Both take and give rows (N, C).
class RmsNormOnDevice : public torch::autograd::Function<RmsNormOnDevice> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const Branch& branch, const at::Tensor& x,
                                                const at::Tensor& weight, double eps,
                                                bool and_one) {
    using Kernel = ThreeTensors(const Branch&, const at::Tensor&, const at::Tensor&, double, bool);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(kRmsNorm, "").typed<Kernel>();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto [sum, y, root] = op.call(branch, x, weight, eps, and_one);
    context->save_for_backward({branch ? sum : x, weight, root});
    context->saved_data["and_one"] = and_one;
    context->set_materialize_grads(false);
    if (branch) return {sum, y};
    return {y};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error(
          "The RMS norm of a device has no second derivative (backward ran with create_graph). "
          "Compute the model on the CPU.");
    }
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &root = saved[2];
    const bool adds = gradients.size() == 2;
    const auto& dy = gradients.back();
    const auto more = adds && gradients[0].defined() ? Branch(as_rows(gradients[0], x)) : Branch();
    if (!dy.defined())
      return {more.value_or(at::Tensor()), more.value_or(at::Tensor()), {}, {}, {}};
    auto dweight =
        context->needs_input_grad(adds ? 2 : 1) ? gradient_place(weight) : at::empty_like(weight);
    using Kernel = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, bool, at::Tensor&, const Branch&);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(kRmsNormBackward, "").typed<Kernel>();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto dx = op.call(as_rows(dy, x), x, root, weight,
                            context->saved_data.at("and_one").toBool(), dweight, more);
    return {adds ? dx : at::Tensor(), dx, std::move(dweight), {}, {}};
  }

 private:
  static at::Tensor as_rows(const at::Tensor& tensor, const at::Tensor& x) {
    return tensor.reshape(x.sizes()).contiguous();
  }
};

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)}).contiguous();
}

// Compute the shapes alone, for traces.
ThreeTensors rms_norm_on_meta(const Branch& branch, const at::Tensor& x,
                              const at::Tensor& /*weight*/, double /*eps*/, bool /*and_one*/) {
  return {branch ? at::empty_like(x) : at::empty({0}, x.options()), at::empty_like(x),
          at::empty({x.size(0)}, x.options().dtype(at::kFloat))};
}
at::Tensor rms_norm_backward_on_meta(const at::Tensor& /*dy*/, const at::Tensor& x,
                                     const at::Tensor& /*root*/, const at::Tensor& /*weight*/,
                                     bool /*and_one*/, at::Tensor& /*dweight*/,
                                     const Branch& /*more*/) {
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("rms_norm", &rms_norm_on_meta);
  library.impl("rms_norm_backward", &rms_norm_backward_on_meta);
}

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "rms_norm(Tensor? branch, Tensor x, Tensor weight, float eps, bool and_one) -> (Tensor, "
      "Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor root, Tensor weight, bool and_one, Tensor(a!) "
      "dweight, Tensor? more) -> Tensor");
}

SumAndNorm add_rms_norm(const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight,
                        double eps, NormScale scale) {
  const bool alike = branch.scalar_type() == x.scalar_type() && branch.sizes() == x.sizes();
  if (!alike || !has_rms_kernel(x, weight)) {
    auto sum = add_branch(branch, x);
    auto norm = rms_norm(sum, weight, eps, scale);
    return {std::move(sum), std::move(norm)};
  }
  const auto both = RmsNormOnDevice::apply(Branch(rows_of(branch)), rows_of(x), weight, eps,
                                           scale == NormScale::weight_and_one);
  return {both[0].view(x.sizes()), both[1].view(x.sizes())};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormScale scale) {
  if (has_rms_kernel(x, weight)) {
    return RmsNormOnDevice::apply(Branch(), rows_of(x), weight, eps,
                                  scale == NormScale::weight_and_one)[0]
        .view(x.sizes());
  }
  return RmsNormFunction::apply(x, weight, eps, scale == NormScale::weight_and_one);
}

void RmsNormImpl::reset() {
  const double first = scale_ == NormScale::weight_and_one ? 0 : 1;
  weight = register_parameter("weight", at::full({width_}, first));
}

}  // namespace zero
