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

class FeedForward : public torch::autograd::Function<FeedForward> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight1, const at::Tensor& weight2,
                            const OptionalBias& bias1, const OptionalBias& bias2, bool transposed) {
    const auto [h, y] = linear_gelu(x, weight1, bias1, transposed);
    // A frozen weight has no gradient, which is all that needs x.
    context->save_for_backward({weight1.requires_grad() ? x : at::Tensor(), weight1, weight2,
                                bias1.value_or(at::Tensor()), bias2.value_or(at::Tensor()), h});
    context->saved_data["transposed"] = transposed;
    return product(y, as_in_out(weight2, transposed), bias2.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error(
          "feed_forward has no second derivative (backward ran with create_graph). Use tanh_gelu "
          "and linear.");
    }
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight1 = saved[1], &weight2 = saved[2], &bias1 = saved[3],
               &bias2 = saved[4], &h = saved[5];
    const bool transposed = context->saved_data.at("transposed").toBool();
    // Inputs that are absent have no number.
    const size_t first_bias = 3, second_bias = bias1.defined() ? 4 : 3;
    const WantedGradients first{.x = context->needs_input_grad(0),
                                .weight = context->needs_input_grad(1),
                                .bias = bias1.defined() && context->needs_input_grad(first_bias)};
    const WantedGradients second{.weight = context->needs_input_grad(2),
                                 .bias = bias2.defined() && context->needs_input_grad(second_bias)};

    const auto dy = gradients[0].contiguous();
    const auto of_bias1 = first.bias ? gradient_place(bias1) : at::Tensor();
    at::Tensor dh;
    if (first.x || first.weight || first.bias)
      dh = linear_gelu_backward(dy, weight2, h, if_defined(of_bias1), transposed);
    const auto y = second.weight ? gelu_values(h) : at::Tensor();
    const auto of_second = linear_gradients(dy, y, weight2, bias2, transposed, second);
    LinearGradients of_first;
    if (first.x || first.weight) {
      of_first = linear_gradients(dh, x, weight1, bias1, transposed,
                                  {.x = first.x, .weight = first.weight});
    }
    return {of_first.x, of_first.weight, of_second.weight, of_bias1, of_second.bias, at::Tensor()};
  }
};

bool by_epilogues(const at::Tensor& x, const at::Tensor& weight1, const at::Tensor& bias1,
                  const at::Tensor& weight2, const at::Tensor& bias2, bool transposed) {
  const auto use = Epilogues::use();
  if (use == EpilogueUse::never || on_cpu(x) || x.numel() == 0 || autocast_dtype(x)) return false;
  const auto dtype = x.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  for (const auto& tensor : {weight1, bias1, weight2, bias2})
    if (tensor.defined() && tensor.scalar_type() != dtype) return false;
  const int64_t outputs = transposed ? 0 : 1;
  for (const auto width : {x.size(-1), weight1.size(outputs), weight2.size(outputs)})
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
  return FeedForward::apply(rows, weight1, weight2, if_defined(bias1), if_defined(bias2),
                            transposed)
      .view(sizes);
}

}  // namespace zero
