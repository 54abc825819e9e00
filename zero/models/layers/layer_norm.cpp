#include "zero/models/layers/layer_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/gradient_place.h"
#include "zero/base/traced.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kNorm = "zero::layer_norm", *kNormBackward = "zero::layer_norm_backward";

// Kernels take rows up to this width; a narrow row gives a thread too little to do.
constexpr int64_t kMostColumns = 2048, kFewestColumns = 128, kMultiple = 8;

bool has_kernel(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (on_cpu(x) || autocast_dtype(x) || x.dim() == 0) return false;
  const auto columns = x.size(-1);
  const auto dtype = x.scalar_type();
  const bool suits = columns >= kFewestColumns && columns <= kMostColumns &&
                     columns % kMultiple == 0 && weight.scalar_type() == dtype &&
                     bias.scalar_type() == dtype &&
                     (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
  if (!suits) return false;
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, x.device());
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(kNormBackward, "")
      .hasKernelForDispatchKey(key);
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
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &bias = saved[2], &mean = saved[3],
               &rstd = saved[4];
    const bool all = context->needs_input_grad(0) && context->needs_input_grad(1) &&
                     context->needs_input_grad(2);
    if (at::GradMode::is_enabled() || !all) {
      auto [dx, dweight, dbias] = at::native_layer_norm_backward(
          gradients[0], x, {x.size(-1)}, mean.view({-1, 1}), rstd.view({-1, 1}), weight, bias,
          {context->needs_input_grad(0), context->needs_input_grad(1),
           context->needs_input_grad(2)});
      return {dx, dweight, dbias, at::Tensor()};
    }
    auto dweight = gradient_place(weight);
    auto dbias = gradient_place(bias);
    const auto dx = layer_norm_backward(gradients[0].reshape(x.sizes()).contiguous(), x,
                                        mean.view({-1}), rstd.view({-1}), weight, dweight, dbias);
    return {dx, std::move(dweight), std::move(dbias), at::Tensor()};
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
at::Tensor norm_backward_on_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& /*m*/,
                                 const at::Tensor& /*rstd*/, const at::Tensor& /*weight*/,
                                 at::Tensor& /*dweight*/, at::Tensor& /*dbias*/) {
  (void)dy;
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("layer_norm", &norm_on_meta);
  library.impl("layer_norm_backward", &norm_backward_on_meta);
}

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)");
  library.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, "
      "Tensor(a!) dweight, Tensor(b!) dbias) -> Tensor");
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps) {
  if (!has_kernel(x, weight, bias)) return at::layer_norm(x, {weight.size(0)}, weight, bias, eps);
  const auto rows = x.reshape({-1, x.size(-1)}).contiguous();
  return LayerNorm::apply(rows, weight, bias, eps).view(x.sizes());
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                               const at::Tensor& rstd, const at::Tensor& weight,
                               at::Tensor& dweight, at::Tensor& dbias) {
  using Kernel = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kNormBackward, "").typed<Kernel>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(dy, x, mean, rstd, weight, dweight, dbias);
}

}  // namespace zero
