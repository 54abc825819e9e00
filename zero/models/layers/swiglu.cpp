#include "zero/models/layers/swiglu.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

namespace zero {
namespace {

struct Silu {
  static at::Tensor values(const at::Tensor& x) { return at::silu(x); }
  static at::Tensor gradient(const at::Tensor& dy, const at::Tensor& x) {
    return at::silu_backward(dy, x);
  }
};

struct TanhGelu {
  static at::Tensor values(const at::Tensor& x) { return at::gelu(x, "tanh"); }
  static at::Tensor gradient(const at::Tensor& dy, const at::Tensor& x) {
    return at::gelu_backward(dy, x, "tanh");
  }
};

template <class Activation>
class Gate : public torch::autograd::Function<Gate<Activation>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return Activation::values(gate).mul_(up);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    const auto& dy = gradients[0];
    return {Activation::gradient(dy * up, gate), dy * Activation::values(gate)};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return Gate<Silu>::apply(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  return Gate<TanhGelu>::apply(gate, up);
}

}  // namespace zero
