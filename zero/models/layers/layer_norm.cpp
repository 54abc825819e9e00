#include "zero/models/layers/layer_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/gradient_place.h"
#include "zero/base/traced.h"
#include "zero/models/layers/device_kernel.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kNorm = "zero::layer_norm", *kAddNorm = "zero::add_layer_norm",
                     *kNormBackward = "zero::layer_norm_backward";

// Kernels take rows up to this width; a narrow row gives a thread too little to do.
constexpr int64_t kMostColumns = 2048, kFewestColumns = 128, kMultiple = 8;

bool has_kernel(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                const char* name = kNormBackward) {
  if (on_cpu(x) || autocast_dtype(x) || x.dim() == 0) return false;
  const auto columns = x.size(-1);
  const auto dtype = x.scalar_type();
  const bool suits = columns >= kFewestColumns && columns <= kMostColumns &&
                     columns % kMultiple == 0 && weight.scalar_type() == dtype &&
                     bias.scalar_type() == dtype && has_kernel_dtype(x);
  return suits && has_device_kernel(x, name);
}

// Returns the gradients of x, weight and bias of a norm, of which some may not be wanted. `more` is
// added to that of x.
variable_list gradients_of(AutogradContext* context, const at::Tensor& gradient,
                           const at::Tensor& more, const std::array<bool, 3>& wanted) {
  const auto saved = context->get_saved_variables();
  const auto &x = saved[0], &weight = saved[1], &bias = saved[2], &mean = saved[3],
             &rstd = saved[4];
  const bool all = wanted[0] && wanted[1] && wanted[2];
  if (at::GradMode::is_enabled() || !all) {
    auto [dx, dweight, dbias] = at::native_layer_norm_backward(
        gradient, x, {x.size(-1)}, mean.view({-1, 1}), rstd.view({-1, 1}), weight, bias, wanted);
    if (more.defined() && wanted[0]) dx = dx + more;
    return {dx, dweight, dbias};
  }
  auto dweight = gradient_place(weight);
  auto dbias = gradient_place(bias);
  const auto as_rows = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.reshape(x.sizes()).contiguous() : tensor;
  };
  const auto dx = layer_norm_backward(as_rows(gradient), x, mean.view({-1}), rstd.view({-1}),
                                      weight, dweight, dbias, as_rows(more));
  return {dx, std::move(dweight), std::move(dbias)};
}

class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps) {
    using Kernel = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(kNorm, "").typed<Kernel>();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto [y, mean, rstd] = op.call(x, weight, bias, eps);
    context->save_for_backward({x, weight, bias, mean, rstd});
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto found = gradients_of(
        context, gradients[0], {},
        {context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2)});
    found.emplace_back();
    return found;
  }
};

class AddLayerNorm : public torch::autograd::Function<AddLayerNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& branch,
                               const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, double eps) {
    using Kernel = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(kAddNorm, "").typed<Kernel>();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto [sum, y, mean, rstd] = op.call(branch, x, weight, bias, eps);
    context->save_for_backward({sum, weight, bias, mean, rstd});
    context->set_materialize_grads(false);
    return {sum, y};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto &of_sum = gradients[0], &of_norm = gradients[1];
    if (!of_norm.defined()) return {of_sum, of_sum, at::Tensor(), at::Tensor(), at::Tensor()};
    const bool branch = context->needs_input_grad(0), x = context->needs_input_grad(1);
    const auto found =
        gradients_of(context, of_norm, of_sum,
                     {branch || x, context->needs_input_grad(2), context->needs_input_grad(3)});
    return {branch ? found[0] : at::Tensor(), x ? found[0] : at::Tensor(), found[1], found[2],
            at::Tensor()};
  }
};

// Computes the shapes alone, for traces.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_on_meta(const at::Tensor& x,
                                                            const at::Tensor& /*weight*/,
                                                            const at::Tensor& /*bias*/,
                                                            double /*eps*/) {
  const auto row = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  return {at::empty_like(x), row, at::empty_like(row)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_norm_on_meta(
    const at::Tensor& /*branch*/, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& bias, double eps) {
  auto [y, mean, rstd] = norm_on_meta(x, weight, bias, eps);
  return {at::empty_like(x), y, mean, rstd};
}
at::Tensor norm_backward_on_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& /*m*/,
                                 const at::Tensor& /*rstd*/, const at::Tensor& /*weight*/,
                                 at::Tensor& /*dweight*/, at::Tensor& /*dbias*/,
                                 const std::optional<at::Tensor>& /*more*/) {
  (void)dy;
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("layer_norm", &norm_on_meta);
  library.impl("add_layer_norm", &add_norm_on_meta);
  library.impl("layer_norm_backward", &norm_backward_on_meta);
}

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)");
  library.def(
      "add_layer_norm(Tensor branch, Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, "
      "Tensor, Tensor, Tensor)");
  library.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, "
      "Tensor(a!) dweight, Tensor(b!) dbias, Tensor? more) -> Tensor");
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps) {
  if (!has_kernel(x, weight, bias)) return at::layer_norm(x, {weight.size(0)}, weight, bias, eps);
  const auto rows = x.reshape({-1, x.size(-1)}).contiguous();
  return LayerNorm::apply(rows, weight, bias, eps).view(x.sizes());
}

SumAndNorm add_layer_norm(const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias, double eps) {
  const bool alike = branch.scalar_type() == x.scalar_type() && branch.sizes() == x.sizes();
  if (!alike || !has_kernel(x, weight, bias, kAddNorm)) {
    auto sum = add_branch(branch, x);
    auto norm = layer_norm(sum, weight, bias, eps);
    return {std::move(sum), std::move(norm)};
  }
  const auto rows = [](const at::Tensor& tensor) {
    return tensor.reshape({-1, tensor.size(-1)}).contiguous();
  };
  const auto both = AddLayerNorm::apply(rows(branch), rows(x), weight, bias, eps);
  return {both[0].view(x.sizes()), both[1].view(x.sizes())};
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                               const at::Tensor& rstd, const at::Tensor& weight,
                               at::Tensor& dweight, at::Tensor& dbias, const at::Tensor& more) {
  using Kernel =
      at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const at::Tensor&, at::Tensor&, at::Tensor&, const std::optional<at::Tensor>&);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kNormBackward, "").typed<Kernel>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(dy, x, mean, rstd, weight, dweight, dbias,
                 more.defined() ? std::optional(more) : std::nullopt);
}

}  // namespace zero
