#include "zero/models/layers/feed_forward.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/traced.h"
#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/device_kernel.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/linear_gradients.h"
#include "zero/models/layers/matmul.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalBias = std::optional<at::Tensor>;

constexpr const char *kLinearGelu = "zero::linear_gelu",
                     *kLinearGeluBackward = "zero::linear_gelu_backward";

// Rows of numbers in 16 bits begin at multiples of 16 bytes then, as the operators need them.
constexpr int64_t kRowMultiple = 8;

std::atomic<EpilogueUse> use_now = EpilogueUse::where_faster;

using EpiloguesFaster = bool (*)(c10::DeviceIndex);
std::atomic<EpiloguesFaster>& faster_on(c10::DeviceType type) {
  static std::array<std::atomic<EpiloguesFaster>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all{};
  return all.at(static_cast<size_t>(type));
}

at::Tensor gelu_values(const at::Tensor& h) {
  return has_tanh_gelu_kernel(h) ? tanh_gelu_values(h) : at::gelu(h, "tanh");
}

// --- The operators

std::tuple<at::Tensor, at::Tensor> linear_gelu_on_cpu(const at::Tensor& x, const at::Tensor& weight,
                                                      const OptionalBias& bias, bool transposed) {
  auto h = product(x, as_in_out(weight, transposed), bias.value_or(at::Tensor()));
  auto y = gelu_values(h);
  return {std::move(h), std::move(y)};
}

at::Tensor linear_gelu_backward_on_cpu(const at::Tensor& dy, const at::Tensor& weight,
                                       const at::Tensor& h, const OptionalBias& bias_gradient,
                                       bool transposed) {
  auto dh = product(dy, as_in_out(weight, !transposed));
  if (has_tanh_gelu_kernel(h)) {
    tanh_gelu_gradient(h, dh, dh);
  } else {
    dh = at::gelu_backward(dh, h, "tanh");
  }
  if (bias_gradient) {
    auto sums = *bias_gradient;
    column_sums_into(sums, dh);
  }
  return dh;
}

// Computes the shapes alone, for traces.
std::tuple<at::Tensor, at::Tensor> linear_gelu_on_meta(const at::Tensor& x,
                                                       const at::Tensor& weight,
                                                       const OptionalBias& /*bias*/,
                                                       bool transposed) {
  auto h = at::empty({x.size(0), weight.size(transposed ? 0 : 1)}, x.options());
  auto y = at::empty_like(h);
  return {std::move(h), std::move(y)};
}
at::Tensor linear_gelu_backward_on_meta(const at::Tensor& /*dy*/, const at::Tensor& /*weight*/,
                                        const at::Tensor& h, const OptionalBias& /*bias_gradient*/,
                                        bool /*transposed*/) {
  return at::empty_like(h);
}

std::tuple<at::Tensor, at::Tensor> linear_gelu(const at::Tensor& x, const at::Tensor& weight,
                                               const OptionalBias& bias, bool transposed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kLinearGelu, "")
                             .typed<decltype(linear_gelu_on_cpu)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(x, weight, bias, transposed);
}

at::Tensor linear_gelu_backward(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& h,
                                const OptionalBias& bias_gradient, bool transposed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kLinearGeluBackward, "")
                             .typed<decltype(linear_gelu_backward_on_cpu)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(dy, weight, h, bias_gradient, transposed);
}

// --- The layer

OptionalBias if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalBias(tensor) : std::nullopt;
}

// Note [Two functions of a feed-forward layer]
// The gradients of the second weight are there before those of the first are computed, so that an
// engine may exchange them meanwhile. The first bias is an input of both functions: its gradient is
// made with GELU's derivative, in the backward pass of the second. No gradient of y is needed.
class LinearBeforeGelu : public torch::autograd::Function<LinearBeforeGelu> {
 public:
  // -> h, y
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const at::Tensor& weight, const OptionalBias& bias,
                               bool transposed) {
    auto [h, y] = linear_gelu(x, weight, bias, transposed);
    // A frozen weight has no gradient, which is all that needs x.
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    context->saved_data["transposed"] = transposed;
    context->mark_non_differentiable({y});
    context->set_materialize_grads(false);
    return {std::move(h), std::move(y)};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& dh = gradients[0];
    if (!dh.defined()) return variable_list(4);
    const auto saved = context->get_saved_variables();
    const auto of = linear_gradients(
        dh, saved[0], saved[1], {}, context->saved_data.at("transposed").toBool(),
        {.x = context->needs_input_grad(0), .weight = context->needs_input_grad(1)});
    return {of.x, of.weight, at::Tensor(), at::Tensor()};
  }
};

class LinearAfterGelu : public torch::autograd::Function<LinearAfterGelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h, const at::Tensor& y,
                            const at::Tensor& weight, const OptionalBias& bias_before,
                            const OptionalBias& bias, bool transposed) {
    context->save_for_backward(
        {h, weight, bias_before.value_or(at::Tensor()), bias.value_or(at::Tensor())});
    context->saved_data["transposed"] = transposed;
    return product(y, as_in_out(weight, transposed), bias.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error(
          "feed_forward has no second derivative (backward ran with create_graph). Use tanh_gelu "
          "and linear.");
    }
    const auto saved = context->get_saved_variables();
    const auto &h = saved[0], &weight = saved[1], &bias_before = saved[2], &bias = saved[3];
    const bool transposed = context->saved_data.at("transposed").toBool();
    // Their numbers among the inputs that are there.
    const size_t of_weight = 2, of_bias_before = 3, of_bias = bias_before.defined() ? 4 : 3;
    const WantedGradients wanted{.x = context->needs_input_grad(0),
                                 .weight = context->needs_input_grad(of_weight),
                                 .bias = bias.defined() && context->needs_input_grad(of_bias)};
    const auto dy = gradients[0].contiguous();
    at::Tensor dh, of_before;
    if (bias_before.defined() && context->needs_input_grad(of_bias_before))
      of_before = gradient_place(bias_before);
    if (wanted.x || of_before.defined())
      dh = linear_gelu_backward(dy, weight, h, if_defined(of_before), transposed);
    const auto y = wanted.weight ? gelu_values(h) : at::Tensor();
    const auto of = linear_gradients(dy, y, weight, bias, transposed,
                                     {.weight = wanted.weight, .bias = wanted.bias});
    return {dh, at::Tensor(), of.weight, of_before, of.bias, at::Tensor()};
  }
};

bool by_epilogues(const at::Tensor& x, const at::Tensor& weight1, const at::Tensor& bias1,
                  const at::Tensor& weight2, const at::Tensor& bias2, bool transposed) {
  const auto use = Epilogues::use();
  if (use == EpilogueUse::never || on_cpu(x) || x.numel() == 0 || autocast_dtype(x)) return false;
  const auto dtype = x.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  for (const auto& tensor : {weight1, bias1, weight2, bias2}) {
    if (tensor.defined() &&
        (tensor.scalar_type() != dtype || tensor.device() != x.device() || !tensor.is_contiguous()))
      return false;
  }
  if (weight1.dim() != 2 || weight2.dim() != 2) return false;
  // Shapes that do not go together are the other way's to refuse.
  const int64_t outputs = transposed ? 0 : 1;
  const auto in = x.size(-1), between = weight1.size(outputs), out = weight2.size(outputs);
  const auto fits = [](const at::Tensor& bias, int64_t width) {
    return !bias.defined() || (bias.dim() == 1 && bias.size(0) == width);
  };
  if (weight1.size(1 - outputs) != in || weight2.size(1 - outputs) != between ||
      !fits(bias1, between) || !fits(bias2, out))
    return false;
  for (const auto width : {in, between, out})
    if (width % kRowMultiple != 0) return false;
  if (!has_device_kernel(x, kLinearGelu) || !has_device_kernel(x, kLinearGeluBackward))
    return false;
  const auto faster = faster_on(x.device().type()).load();
  return use == EpilogueUse::always || faster == nullptr || faster(x.device().index());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "linear_gelu(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> (Tensor, Tensor)");
  library.def(
      "linear_gelu_backward(Tensor dy, Tensor weight, Tensor h, Tensor(a!)? bias_gradient, bool "
      "transposed) -> Tensor");
}

TORCH_LIBRARY_IMPL(zero, CPU, library) {
  library.impl("linear_gelu", &linear_gelu_on_cpu);
  library.impl("linear_gelu_backward", &linear_gelu_backward_on_cpu);
}

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("linear_gelu", &linear_gelu_on_meta);
  library.impl("linear_gelu_backward", &linear_gelu_backward_on_meta);
}

Epilogues::Epilogues(EpilogueUse use) : before_(use_now.exchange(use)) {}
Epilogues::~Epilogues() { use_now = before_; }
EpilogueUse Epilogues::use() { return use_now; }

void set_epilogues_faster(c10::DeviceType type, bool (*faster)(c10::DeviceIndex index)) {
  faster_on(type) = faster;
}

at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& weight1, const at::Tensor& bias1,
                        const at::Tensor& weight2, const at::Tensor& bias2, WeightLayout layout) {
  const bool transposed = layout == WeightLayout::out_in;
  if (!by_epilogues(x, weight1, bias1, weight2, bias2, transposed))
    return gelu_linear(linear(x, weight1, bias1, layout), weight2, bias2, layout);
  auto sizes = x.sizes().vec();
  sizes.back() = weight2.size(transposed ? 0 : 1);
  const auto rows = x.reshape({-1, x.size(-1)}).contiguous();
  const auto before = LinearBeforeGelu::apply(rows, weight1, if_defined(bias1), transposed);
  return LinearAfterGelu::apply(before[0], before[1], weight2, if_defined(bias1), if_defined(bias2),
                                transposed)
      .view(sizes);
}

}  // namespace zero
