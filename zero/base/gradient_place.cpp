#include "zero/base/gradient_place.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "zero/base/autocast.h"

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

bool announce_rows(const at::Tensor& parameter, const at::Tensor& indices) {
  auto* collector = collector_of(parameter);
  const bool cast =
      autocast_dtype(parameter).value_or(parameter.scalar_type()) != parameter.scalar_type();
  return collector != nullptr && !cast && parameter.is_cpu() && parameter.dim() == 2 &&
         parameter.is_contiguous() && indices.numel() > 0 && indices.numel() <= parameter.size(1) &&
         torch::autograd::impl::hooks(parameter).empty() && collector->announce_rows(indices);
}

GradientTiles* gradient_tiles(const at::Tensor& parameter) {
  auto* collector = collector_of(parameter);
  return collector != nullptr ? collector->tiles() : nullptr;
}

void returns_whole(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (auto* collector = collector_of(parameter)) collector->returns_whole(gradient);
}

}  // namespace zero
