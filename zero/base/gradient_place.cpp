#include "zero/base/gradient_place.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "zero/base/autocast.h"

namespace zero {

namespace {

GradientPlace* collector_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return dynamic_cast<GradientPlace*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

// Returns the collector if the parameter's gradient may be taken as rows, or null.
GradientPlace* collector_of_rows(const at::Tensor& parameter, const at::Tensor& indices) {
  auto* collector = collector_of(parameter);
  if (collector == nullptr || !parameter.is_cpu() || parameter.dim() != 2 ||
      !parameter.is_contiguous() || indices.numel() == 0 || shows_gradient(parameter))
    return nullptr;
  const bool cast =
      autocast_dtype(parameter).value_or(parameter.scalar_type()) != parameter.scalar_type();
  return cast ? nullptr : collector;
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

bool shows_gradient(const at::Tensor& parameter) {
  const auto* collector = collector_of(parameter);
  return (collector != nullptr && collector->shows_gradient()) ||
         !torch::autograd::impl::hooks(parameter).empty();
}

bool announce_rows(const at::Tensor& parameter, const at::Tensor& indices) {
  auto* collector = collector_of_rows(parameter, indices);
  return collector != nullptr && indices.numel() <= parameter.size(1) &&
         collector->announce_rows(indices);
}

c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(const at::Tensor& parameter,
                                                     const at::Tensor& indices) {
  if (torch::autograd::get_current_graph_task_id() != -1) return {};
  auto* collector = collector_of_rows(parameter, indices);
  return collector != nullptr ? collector->announce_look_up(indices)
                              : c10::intrusive_ptr<AnnouncedLookUp>();
}

GradientTaker* gradient_taker(const at::Tensor& parameter) {
  auto* collector = collector_of(parameter);
  return collector != nullptr ? collector->taker() : nullptr;
}

void returns_whole(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (auto* collector = collector_of(parameter)) collector->returns_whole(gradient);
}

}  // namespace zero
