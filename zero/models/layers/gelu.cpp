#include "zero/models/layers/gelu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "zero/base/observed.h"
#include "zero/models/layers/device_kernel.h"
#include "zero/models/layers/gelu_kernel.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kGrain = 16384;  // elements a thread

bool is_bf16(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16; }

class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input) {
    const auto x = input.contiguous();
    context->save_for_backward({x});
    return tanh_gelu_values(x);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto x = context->get_saved_variables()[0];
    if (at::GradMode::is_enabled()) return {at::gelu_backward(gradients[0], x, "tanh")};
    const auto dx = at::empty_like(x);
    tanh_gelu_gradient(x, gradients[0].contiguous(), dx);
    return {dx};
  }
};

constexpr const char *kGeluForward = "zero::tanh_gelu", *kGeluBackward = "zero::tanh_gelu_backward";

at::Tensor enqueue_backward(const at::Tensor& x, const at::Tensor& dy, at::Tensor dx, bool again) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(kGeluBackward, "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, at::Tensor&, bool)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(x, dy, dx, again);
}

// Computes the shapes alone, for traces.
at::Tensor values_on_meta(const at::Tensor& x) { return at::empty_like(x); }
at::Tensor backward_on_meta(const at::Tensor& x, const at::Tensor& /*dy*/, at::Tensor& dx,
                            bool again) {
  return again ? at::empty_like(x) : dx;
}
// Computes as the functions below do, for a planner that runs operators one by one.
at::Tensor backward_on_cpu(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, bool again) {
  if (again) return tanh_gelu_again(x, dx.copy_(dy));
  tanh_gelu_gradient(x, dy, dx);
  return dx;
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("tanh_gelu", &values_on_meta);
  library.impl("tanh_gelu_backward", &backward_on_meta);
}

TORCH_LIBRARY_IMPL(zero, CPU, library) {
  library.impl("tanh_gelu", &tanh_gelu_values);
  library.impl("tanh_gelu_backward", &backward_on_cpu);
}

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def("tanh_gelu(Tensor x) -> Tensor");
  library.def("tanh_gelu_backward(Tensor x, Tensor dy, Tensor(a!) dx, bool again) -> Tensor");
}

bool has_tanh_gelu_kernel(const at::Tensor& x) {
  const bool known = x.scalar_type() == at::kFloat || is_bf16(x);
  if (x.is_cpu()) return known;
  if (!known && x.scalar_type() != at::kHalf) return false;
  return has_device_kernel(x, kGeluForward);
}

at::Tensor tanh_gelu_values(const at::Tensor& x) {
  if (!x.is_cpu()) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(kGeluForward, "")
                               .typed<at::Tensor(const at::Tensor&)>();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    return op.call(x);
  }
  auto y = at::empty_like(x);
  const auto* from = x.const_data_ptr();
  auto* to = y.mutable_data_ptr();
  observed("zero::tanh_gelu", std::array{x}, std::array{y}, [&] {
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      gelu_forward(from, to, begin, end, is_bf16(x));
    });
  });
  return y;
}

void tanh_gelu_gradient(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx) {
  if (!x.is_cpu()) {
    enqueue_backward(x, dy, dx, false);
    return;
  }
  const auto* input = x.const_data_ptr();
  const auto* from = dy.const_data_ptr();
  auto* to = dx.mutable_data_ptr();
  observed("zero::tanh_gelu_backward", std::array{x, dy}, std::array{dx}, [&] {
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      gelu_backward(input, from, to, begin, end, is_bf16(x));
    });
  });
}

at::Tensor tanh_gelu_again(const at::Tensor& x, const at::Tensor& dy) {
  if (!x.is_cpu()) return enqueue_backward(x, dy, dy, true);
  tanh_gelu_gradient(x, dy, dy);
  return tanh_gelu_values(x);
}

at::Tensor tanh_gelu(const at::Tensor& x) {
  return has_tanh_gelu_kernel(x) ? Gelu::apply(x) : at::gelu(x, "tanh");
}

}  // namespace zero
