#include "zero/models/layers/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "zero/base/traced.h"
#include "zero/models/layers/device_kernel.h"

namespace zero {
namespace {

struct Silu {
  static constexpr bool kGelu = false;
  static at::Tensor values(const at::Tensor& x) { return at::silu(x); }
  static at::Tensor gradient(const at::Tensor& dy, const at::Tensor& x) {
    return at::silu_backward(dy, x);
  }
};

struct TanhGelu {
  static constexpr bool kGelu = true;
  static at::Tensor values(const at::Tensor& x) { return at::gelu(x, "tanh"); }
  static at::Tensor gradient(const at::Tensor& dy, const at::Tensor& x) {
    return at::gelu_backward(dy, x, "tanh");
  }
};

constexpr const char *kGate = "zero::gate", *kGateBackward = "zero::gate_backward";
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

bool has_gate_kernel(const at::Tensor& gate, const at::Tensor& up) {
  return !on_cpu(gate) && up.scalar_type() == gate.scalar_type() && up.sizes() == gate.sizes() &&
         has_kernel_dtype(gate) && has_device_kernel(gate, kGateBackward);
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, bool gelu) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kGate, "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, bool)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(gate.contiguous(), up.contiguous(), gelu);
}

TwoTensors gate_gradients(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up,
                          bool gelu) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(kGateBackward, "")
          .typed<TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(dy.contiguous(), gate.contiguous(), up.contiguous(), gelu);
}

// Compute the shapes alone, for traces.
at::Tensor gate_on_meta(const at::Tensor& gate, const at::Tensor& /*up*/, bool /*gelu*/) {
  return at::empty_like(gate);
}
TwoTensors gate_backward_on_meta(const at::Tensor& /*dy*/, const at::Tensor& gate,
                                 const at::Tensor& up, bool /*gelu*/) {
  return {at::empty_like(gate), at::empty_like(up)};
}

template <class Activation>
class Gate : public torch::autograd::Function<Gate<Activation>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    context->save_for_backward({gate, up});
    if (has_gate_kernel(gate, up)) return gated(gate, up, Activation::kGelu);
    return Activation::values(gate).mul_(up);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    const auto& dy = gradients[0];
    if (!at::GradMode::is_enabled() && has_gate_kernel(gate, up)) {
      auto [of_gate, of_up] = gate_gradients(dy, gate, up, Activation::kGelu);
      return {of_gate, of_up};
    }
    return {Activation::gradient(dy * up, gate), dy * Activation::values(gate)};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(zero, Meta, library) {
  library.impl("gate", &gate_on_meta);
  library.impl("gate_backward", &gate_backward_on_meta);
}

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def("gate(Tensor gate, Tensor up, bool gelu) -> Tensor");
  library.def("gate_backward(Tensor dy, Tensor gate, Tensor up, bool gelu) -> (Tensor, Tensor)");
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return Gate<Silu>::apply(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return Gate<TanhGelu>::apply(gate, up);
}

}  // namespace zero
