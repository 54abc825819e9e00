#include "zero/models/layers/gelu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "zero/base/observed.h"
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

}  // namespace

bool has_tanh_gelu_kernel(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kFloat || is_bf16(x));
}

at::Tensor tanh_gelu_values(const at::Tensor& x) {
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
  const auto* input = x.const_data_ptr();
  const auto* from = dy.const_data_ptr();
  auto* to = dx.mutable_data_ptr();
  observed("zero::tanh_gelu_backward", std::array{x, dy}, std::array{dx}, [&] {
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      gelu_backward(input, from, to, begin, end, is_bf16(x));
    });
  });
}

at::Tensor tanh_gelu(const at::Tensor& x) {
  return has_tanh_gelu_kernel(x) ? Gelu::apply(x) : at::gelu(x, "tanh");
}

}  // namespace zero
