#include "zero/base/gradient_place.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace zero {

namespace {

GradientPlace* collector_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return dynamic_cast<GradientPlace*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

}  // namespace

at::Tensor gradient_place(const at::Tensor& parameter) {
  if (auto* collector = collector_of(parameter)) {
    if (auto place = collector->place(); place.defined()) return place;
  }
  return at::empty_strided(
      parameter.sizes(), parameter.strides(),
      at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device()));
}

double loss_factor(const at::Tensor& parameter) {
  const auto* collector = collector_of(parameter);
  return collector != nullptr ? collector->loss_factor() : 1;
}

}  // namespace zero
