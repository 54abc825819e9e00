// Operators that LibTorch composes of others, and of other ones on this kind of device than on the
// CPU: here the CPU's composition is taken, so that results have the CPU's bits.
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>

#include "tests/device/recurrent.h"

namespace zero::simulated {

namespace {

// Noise that is drawn through a generator among the arguments: see Note [Random numbers]. The fused
// operator that LibTorch would take hides its generator.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros_like(input));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

at::Tensor& dropout_in_place(at::Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.zero_();
  return input.mul_(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

at::Tensor on_cpu_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions(tensor.scalar_type()))
      .set_requires_grad(tensor.requires_grad() && tensor.is_floating_point());
}

// The kernel that the CPU chooses for tensors of the same geometry. Its fused one has a derivative
// of its own.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout_p, bool causal,
                     std::optional<double> scale, bool grouped) {
  constexpr int64_t kFused = 1;  // of at::SDPBackend
  const bool masked = mask.has_value() && mask->defined();
  const auto choice = at::_fused_sdp_choice(
      on_cpu_like(query), on_cpu_like(key), on_cpu_like(value),
      masked ? std::optional(on_cpu_like(*mask)) : std::nullopt, dropout_p, causal, scale, grouped);
  std::optional<at::Tensor> added = mask;
  if (masked && mask->scalar_type() == at::kBool) {  // what may be seen; the kernels add
    const auto options = at::TensorOptions(query.scalar_type());
    added = at::where(*mask, at::scalar_tensor(0.0, options),
                      at::scalar_tensor(-std::numeric_limits<double>::infinity(), options));
  }
  if (choice == kFused) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p,
                                                                       causal, added, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, added, dropout_p,
                                                            causal, std::nullopt, scale, grouped));
}

void register_composites(torch::Library& aten) {
  aten.impl("dropout", &dropout);
  aten.impl("dropout_", &dropout_in_place);
  aten.impl("scaled_dot_product_attention", &attention);
  aten.impl("lstm.input", &lstm);
  aten.impl("gru.input", &gru);
  aten.impl("lstm_cell", &lstm_cell);
  aten.impl("gru_cell", &gru_cell);
  aten.impl("_thnn_fused_lstm_cell", &fused_lstm_cell);
  aten.impl("_thnn_fused_gru_cell", &fused_gru_cell);
}

// With and without autograd, which differentiates what they are composed of.
struct Registration {
  explicit Registration(c10::DispatchKey key)
      : aten(torch::Library::IMPL, "aten", key, __FILE__, __LINE__) {
    register_composites(aten);
  }
  torch::Library aten;
};
const Registration with_autograd(c10::DispatchKey::AutogradPrivateUse1);
const Registration without_autograd(c10::DispatchKey::PrivateUse1);

}  // namespace

}  // namespace zero::simulated
