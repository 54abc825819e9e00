#include "zero/engine/operator_cost.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace zero {

namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Formula = OperatorCost (*)(Inputs);

at::Tensor tensor(Inputs inputs, size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor()
                                                           : at::Tensor();
}

int64_t elements(const at::Tensor& of) { return of.defined() ? of.numel() : 0; }

// Returns the elements for each step along the last dimension: the rows of all matrices of a batch.
int64_t rows(const at::Tensor& of) {
  return of.dim() > 0 && of.size(-1) > 0 ? of.numel() / of.size(-1) : 0;
}

// --- Matrix products ---

// Returns the MACs of a (..., M, K) by b (..., K, N), or by a vector.
int64_t product(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return 0;
  return a.numel() * (b.dim() > 1 ? b.size(-1) : 1);
}

OperatorCost two_factors(Inputs inputs) {
  return {.macs = product(tensor(inputs, 0), tensor(inputs, 1))};
}

OperatorCost added_to(Inputs inputs) {
  return {.macs = product(tensor(inputs, 1), tensor(inputs, 2)), .of_element = 1};
}

// Counts x (..., in) by a weight (out, in).
OperatorCost linear(Inputs inputs) {
  const auto weight = tensor(inputs, 1);
  if (!weight.defined() || !tensor(inputs, 0).defined()) return {};
  return {.macs = rows(tensor(inputs, 0)) * weight.numel(),
          .of_element = tensor(inputs, 2).defined() ? 1 : 0};
}

// Counts x (rows, in) by a weight, (out, in) if `transposed`, and what is done with each element.
OperatorCost linear_gelu(Inputs inputs) {
  const auto x = tensor(inputs, 0);
  const auto weight = tensor(inputs, 1);
  if (inputs.size() < 4 || !x.defined() || !weight.defined()) return {};
  const int64_t elements = rows(x) * weight.size(inputs[3].toBool() ? 0 : 1);
  return {.macs = rows(x) * weight.numel(),
          .flops = elements * (tensor(inputs, 2).defined() ? 2 : 1)};
}

// Counts the product alone: GELU's derivative and sums count nothing elsewhere either.
OperatorCost linear_gelu_backward(Inputs inputs) {
  const auto dy = tensor(inputs, 0);
  const auto weight = tensor(inputs, 1);
  if (!dy.defined() || !weight.defined()) return {};
  return {.macs = rows(dy) * weight.numel()};
}

OperatorCost convolution(Inputs inputs) {
  constexpr size_t kTransposed = 6;
  const auto input = tensor(inputs, 0);
  const auto weight = tensor(inputs, 1);  // (out, in / groups, ...), or (in, out / groups, ...)
  if (!input.defined() || !weight.defined() || weight.dim() == 0 || weight.size(0) == 0) return {};
  const bool transposed =
      inputs.size() > kTransposed && inputs[kTransposed].isBool() && inputs[kTransposed].toBool();
  const int64_t met = weight.numel() / weight.size(0);
  OperatorCost cost{.of_element = tensor(inputs, 2).defined() ? 1 : 0};
  (transposed ? cost.macs : cost.macs_of_element) = transposed ? input.numel() * met : met;
  return cost;
}

OperatorCost attention(Inputs inputs) {
  const auto queries = tensor(inputs, 0);
  const auto keys = tensor(inputs, 1);
  const auto values = tensor(inputs, 2);
  if (!queries.defined() || !keys.defined() || !values.defined() || keys.dim() < 2) return {};
  const int64_t pairs = rows(queries) * keys.size(-2);
  return {.macs = pairs * (queries.size(-1) + values.size(-1))};
}

// Counts an operator whose last list of tensors is its parameters.
OperatorCost recurrent(Inputs inputs) {
  const auto input = tensor(inputs, 0);
  if (!input.defined() || input.dim() == 0) return {};
  for (size_t i = inputs.size(); i-- > 0;) {
    if (!inputs[i].isTensorList()) continue;
    int64_t weights = 0;
    for (const at::Tensor& parameter : inputs[i].toTensorList()) {
      if (parameter.dim() > 1) weights += parameter.numel();
    }
    return {.macs = rows(input) * weights};
  }
  return {};
}

// --- Element by element ---

template <size_t Weight>
OperatorCost normalisation(Inputs inputs) {
  return {.flops = elements(tensor(inputs, 0)) * (tensor(inputs, Weight).defined() ? 5 : 4)};
}

OperatorCost of_result(Inputs /*inputs*/) { return {.of_element = 1}; }
OperatorCost of_input(Inputs inputs) { return {.flops = elements(tensor(inputs, 0))}; }
OperatorCost nothing(Inputs /*inputs*/) { return {}; }

// The names have no "aten::", and no "_" of operators that work in place.
const std::unordered_map<std::string_view, Formula>& formulas() {
  static const auto all = [] {
    std::unordered_map<std::string_view, Formula> table;
    const auto add = [&](Formula formula, std::initializer_list<std::string_view> names) {
      for (const auto name : names) table.emplace(name, formula);
    };
    add(two_factors, {"mm", "bmm", "mv", "dot", "vdot"});
    add(added_to, {"addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"});
    add(linear, {"mkldnn_linear", "mkldnn::_linear_pointwise"});
    add(linear_gelu, {"zero::linear_gelu"});
    add(linear_gelu_backward, {"zero::linear_gelu_backward"});
    add(convolution, {"convolution", "_convolution"});
    add(attention,
        {"scaled_dot_product_attention", "_scaled_dot_product_attention_math",
         "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"});
    add(recurrent, {"lstm", "gru", "rnn_tanh", "rnn_relu"});
    add(normalisation<1>,
        {"batch_norm", "native_batch_norm", "instance_norm", "native_group_norm"});
    add(normalisation<2>,
        {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm"});
    add(of_result, {"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp"});
    add(of_result,
        {"zero::unpacked_weight", "neg", "abs", "square", "pow", "sqrt", "rsqrt", "reciprocal",
         "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "threshold"});
    add(of_result, {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan",
                    "tanh", "atan", "erf", "sigmoid", "log_sigmoid"});
    add(of_result, {"relu", "relu6", "leaky_relu", "rrelu", "prelu", "_prelu_kernel", "elu", "celu",
                    "selu", "gelu", "silu", "mish", "glu", "zero::tanh_gelu"});
    add(of_result, {"hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign"});
    add(of_result,
        {"softmax", "_softmax", "log_softmax", "_log_softmax", "zero::softmax_cross_entropy"});
    add(of_result,
        {"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
         "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"});
    add(of_input, {"avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d",
                   "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
                   "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
                   "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"});
    add(nothing, {"dropout", "native_dropout", "feature_dropout", "alpha_dropout",
                  "feature_alpha_dropout", "embedding", "embedding_bag"});
    return table;
  }();
  return all;
}

}  // namespace

std::optional<OperatorCost> operator_cost(std::string_view name, Inputs inputs) {
  constexpr std::string_view kAten = "aten::";
  if (name.starts_with(kAten)) name.remove_prefix(kAten.size());
  const auto& table = formulas();
  auto found = table.find(name);
  if (found == table.end() && name.ends_with('_'))
    found = table.find(name.substr(0, name.size() - 1));
  if (found == table.end()) return std::nullopt;
  return found->second(inputs);
}

}  // namespace zero
