// Each gives the shapes, strides and dtypes of LibTorch's own kernel.
#include "zero/planner/meta_kernels.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace zero::plan {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Ints = at::IntArrayRef;

Tensor like(const Tensor& x) { return at::empty_like(x); }
Tensor like(const Tensor& x, bool wanted) { return wanted ? at::empty_like(x) : Tensor(); }
Tensor vector(const Tensor& x, int64_t size, at::ScalarType dtype) {
  return at::empty({size}, x.options().dtype(dtype));
}
// Statistics of numbers in 16 bits are in fp32.
at::ScalarType wide(const Tensor& x) { return at::toOpMathType(x.scalar_type()); }

Tensor index_select(const Tensor& self, int64_t dimension, const Tensor& index) {
  auto sizes = self.sizes().vec();
  if (!sizes.empty())
    sizes[static_cast<size_t>(at::maybe_wrap_dim(dimension, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor embedding_backward(const Tensor& gradient, const Tensor& /*indices*/, int64_t rows,
                          int64_t /*padding*/, bool /*scale*/) {
  return at::empty({rows, gradient.size(-1)}, gradient.options());
}

Tensor relu(const Tensor& self) { return like(self); }

Tensor flip(const Tensor& self, Ints /*dimensions*/) { return like(self); }

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes());
  return at::empty(sizes, a.options().dtype(at::result_type(a, b)));
}
Tensor& where_out(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& out) {
  out.resize_(at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes()));
  return out;
}

Three layer_norm(const Tensor& x, Ints normed, const OptionalTensor& weight,
                 const OptionalTensor& /*bias*/, double /*eps*/) {
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < normed.size(); ++i) sizes[sizes.size() - 1 - i] = 1;
  const bool mixed = weight && weight->defined() && weight->scalar_type() != x.scalar_type();
  const auto dtype = mixed ? wide(x) : x.scalar_type();
  const auto statistics = at::empty(sizes, x.options().dtype(dtype));
  return {at::empty(x.sizes(), x.options()), statistics, like(statistics)};
}

Three layer_norm_backward(const Tensor& /*dy*/, const Tensor& x, Ints normed,
                          const Tensor& /*mean*/, const Tensor& /*rstd*/,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          std::array<bool, 3> wanted) {
  const auto of = [&](const OptionalTensor& parameter, bool is_wanted) {
    if (!is_wanted) return Tensor();
    return parameter && parameter->defined() ? like(*parameter) : at::empty(normed, x.options());
  };
  return {wanted[0] ? at::empty(x.sizes(), x.options()) : Tensor(), of(weight, wanted[1]),
          of(bias, wanted[2])};
}

Three batch_norm(const Tensor& x, const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                 const OptionalTensor& /*mean*/, const OptionalTensor& /*variance*/, bool training,
                 double /*momentum*/, double /*eps*/) {
  const int64_t size = training ? x.size(1) : 0;
  return {like(x), vector(x, size, wide(x)), vector(x, size, wide(x))};
}

Three batch_norm_backward(const Tensor& /*dy*/, const Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& /*mean*/, const OptionalTensor& /*variance*/,
                          const OptionalTensor& /*saved_mean*/, const OptionalTensor& /*saved*/,
                          bool /*training*/, double /*eps*/, std::array<bool, 3> wanted) {
  const auto dtype = weight && weight->defined() ? weight->scalar_type() : x.scalar_type();
  return {like(x, wanted[0]), wanted[1] ? vector(x, x.size(1), dtype) : Tensor(),
          wanted[2] ? vector(x, x.size(1), dtype) : Tensor()};
}

Three group_norm(const Tensor& x, const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                 int64_t batch, int64_t /*channels*/, int64_t /*rest*/, int64_t groups,
                 double /*eps*/) {
  const auto statistics = at::empty({batch, groups}, x.options().dtype(x.scalar_type()));
  return {like(x), statistics, like(statistics)};
}

Three group_norm_backward(const Tensor& /*dy*/, const Tensor& x, const Tensor& /*mean*/,
                          const Tensor& /*rstd*/, const OptionalTensor& weight, int64_t /*batch*/,
                          int64_t channels, int64_t /*rest*/, int64_t /*groups*/,
                          std::array<bool, 3> wanted) {
  const auto of = [&](bool is_wanted) {
    if (!is_wanted) return Tensor();
    return weight && weight->defined() ? like(*weight) : vector(x, channels, x.scalar_type());
  };
  return {like(x, wanted[0]), of(wanted[1]), of(wanted[2])};
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& /*bias*/,
                   Ints stride, Ints padding, Ints dilation, bool transposed, Ints output_padding,
                   int64_t groups) {
  const auto sizes =
      transposed
          ? at::native::conv_input_size(x.sizes(), weight.sizes(), padding, output_padding, stride,
                                        dilation, groups)
          : at::native::conv_output_size(x.sizes(), weight.sizes(), padding, stride, dilation);
  return at::empty(sizes, x.options());
}

Three convolution_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, Ints /*stride*/,
                           Ints /*padding*/, Ints /*dilation*/, bool transposed,
                           Ints /*output_padding*/, int64_t groups, std::array<bool, 3> wanted) {
  const int64_t out = transposed ? weight.size(1) * groups : weight.size(0);
  return {like(x, wanted[0]), like(weight, wanted[1]),
          wanted[2] ? at::empty({out}, dy.options()) : Tensor()};
}

// (B, heads, T, D) that lies in memory as (B, T, heads, D).
Tensor by_token(const Tensor& x) {
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

std::tuple<Tensor, Tensor> flash_on_cpu(const Tensor& queries, const Tensor& /*keys*/,
                                        const Tensor& /*values*/, double /*dropout*/,
                                        bool /*causal*/, const OptionalTensor& /*mask*/,
                                        std::optional<double> /*scale*/) {
  return {by_token(queries), at::empty({queries.size(0), queries.size(2), queries.size(1)},
                                       queries.options().dtype(wide(queries)))};
}

Three flash_on_cpu_backward(const Tensor& /*dy*/, const Tensor& queries, const Tensor& keys,
                            const Tensor& values, const Tensor& /*out*/, const Tensor& /*lse*/,
                            double /*dropout*/, bool /*causal*/, const OptionalTensor& /*mask*/,
                            std::optional<double> /*scale*/) {
  return {by_token(queries), by_token(keys), by_token(values)};
}

Tensor pooled(const Tensor& x, Ints size) {
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < size.size(); ++i) sizes[sizes.size() - size.size() + i] = size[i];
  return at::empty(sizes, x.options());
}
Tensor pooled_backward(const Tensor& /*dy*/, const Tensor& x) { return like(x); }

}  // namespace

void add_meta_kernels() {
  // Kept for the life of the process, as a registration at its start would be. The pointer is a
  // static one, so that LeakSanitizer sees who keeps it.
  static const torch::Library* const added = [] {
    auto* library = new torch::Library(torch::Library::IMPL, "aten",  // NOLINT: never freed
                                       c10::DispatchKey::Meta, __FILE__, __LINE__);
    const auto add = [&](const std::string& name, auto* kernel) {
      const auto dot = name.find('.');
      const auto op = c10::Dispatcher::singleton().findSchema(
          {"aten::" + name.substr(0, dot),
           dot == std::string::npos ? std::string() : name.substr(dot + 1)});
      if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::Meta)) return;
      library->impl(name.c_str(), kernel);
    };
    add("index_select", &index_select);
    add("embedding_dense_backward", &embedding_backward);
    add("relu", &relu);
    add("flip", &flip);
    add("where.self", &where);
    add("where.self_out", &where_out);
    add("native_layer_norm", &layer_norm);
    add("native_layer_norm_backward", &layer_norm_backward);
    add("native_batch_norm", &batch_norm);
    add("native_batch_norm_backward", &batch_norm_backward);
    add("native_group_norm", &group_norm);
    add("native_group_norm_backward", &group_norm_backward);
    add("convolution_overrideable", &convolution);
    add("convolution_backward_overrideable", &convolution_backward);
    add("_scaled_dot_product_flash_attention_for_cpu", &flash_on_cpu);
    add("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_on_cpu_backward);
    add("_adaptive_avg_pool2d", &pooled);
    add("_adaptive_avg_pool2d_backward", &pooled_backward);
    return library;
  }();
  (void)added;
}

}  // namespace zero::plan
