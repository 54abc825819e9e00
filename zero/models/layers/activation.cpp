#include "zero/models/layers/activation.h"

#include <ATen/ATen.h>

#include "zero/models/layers/gelu.h"

namespace zero {

const std::vector<std::string>& activation_names() {
  static const std::vector<std::string> names{"gelu_new", "gelu", "relu", "silu", "tanh"};
  return names;
}

std::string activation_called(std::string name) {
  if (name == "gelu_pytorch_tanh" || name == "gelu_fast") return "gelu_new";
  if (name == "swish") return "silu";
  return name;
}

at::Tensor activated(const at::Tensor& x, std::string_view name) {
  if (name == "gelu_new") return tanh_gelu(x);
  if (name == "gelu") return at::gelu(x);
  if (name == "relu") return at::relu(x);
  if (name == "silu") return at::silu(x);
  return at::tanh(x);
}

at::Tensor feed_forward(Projection& first, Projection& second, const at::Tensor& x,
                        std::string_view name) {
  return name == "gelu_new" ? first->forward_to_gelu(x, *second)
                            : second(activated(first(x), name));
}

at::Tensor drop(const at::Tensor& x, double p, bool training) {
  return training && p > 0 ? at::dropout(x, p, true) : x;
}

}  // namespace zero
