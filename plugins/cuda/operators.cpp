// The operators of libzero for CUDA tensors: see Note [Kernels of a device] in
// zero/optim/operators.h. They are registered when this library is loaded.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <variant>

#include "plugins/cuda/kernels.h"
#include "zero/optim/operators.h"

namespace zero::cuda {
namespace {

void update_on_cuda(const c10::intrusive_ptr<optim::UpdateCall>& call, const at::Tensor& gradient,
                    const at::Tensor& master, const std::optional<at::Tensor>& parameter,
                    at::TensorList states) {
  const auto all = optim::operands_of(*call, gradient, master, parameter, states);
  const c10::cuda::CUDAGuard guard(gradient.device());
  std::visit(
      [&](const auto& operands) {
        update(call->optimizer, call->moment, static_cast<float>(call->gradient_scale), operands,
               c10::cuda::getCurrentCUDAStream());
      },
      all);
}

void squared_norm_on_cuda(const at::Tensor& values, const at::Tensor& sums) {
  const auto dtype = values.scalar_type();
  TORCH_CHECK(
      values.is_contiguous() && sums.is_contiguous() && sums.numel() == 2 &&
          sums.device() == values.device(),
      "zero::squared_norm_: the values are no contiguous array, or the sums no array of two "
      "numbers beside them");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "zero::squared_norm_: the values are in fp32, bf16 or fp16, and not ", dtype);
  const c10::cuda::CUDAGuard guard(values.device());
  // It goes back to LibTorch's allocator at once, which hands it out again on this stream alone, so
  // after the kernels that use it.
  const auto workspace =
      at::empty({norm_blocks(values.numel())}, values.options().dtype(at::kDouble));
  squared_norm(values.const_data_ptr(), dtype, values.numel(), workspace.mutable_data_ptr<double>(),
               sums.mutable_data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
}

void squared_norms_on_cuda(at::TensorList values, const at::Tensor& sums) {
  using optim::device::NormArrays;
  TORCH_CHECK(sums.is_contiguous() && sums.scalar_type() == at::kDouble &&
                  sums.numel() == 2 * static_cast<int64_t>(values.size()),
              "zero::squared_norms_: the sums are no array of two numbers for each array");
  const c10::cuda::CUDAGuard guard(sums.device());
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    NormArrays arrays;
    NormRowNumbers rows{};
    const auto launch = [&] {
      const auto workspace = at::empty({arrays.blocks}, sums.options());
      squared_norms(arrays, dtype, rows, workspace.mutable_data_ptr<double>(),
                    sums.mutable_data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
      arrays = {};
    };
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& array = values[i];
      TORCH_CHECK(array.is_contiguous() && array.device() == sums.device() &&
                      (array.scalar_type() == at::kFloat || array.scalar_type() == at::kBFloat16 ||
                       array.scalar_type() == at::kHalf),
                  "zero::squared_norms_: array ", i,
                  " is not contiguous, not beside the sums, or not in fp32, bf16 or fp16");
      if (array.scalar_type() != dtype) continue;
      rows.rows[arrays.count] = static_cast<int32_t>(i);
      arrays.add(array.const_data_ptr(), array.numel());
      if (arrays.count == NormArrays::kMost) launch();
    }
    if (arrays.count > 0) launch();
  }
}

at::Tensor softmax_cross_entropy_on_cuda(at::Tensor& logits, const at::Tensor& targets,
                                         const at::Tensor& row_scale, bool gradient,
                                         double smoothing) {
  const auto rows = logits.size(0);
  const auto beside = [&](const at::Tensor& array) {
    return array.dim() == 1 && array.size(0) == rows && array.device() == logits.device();
  };
  TORCH_CHECK(
      logits.dim() == 2 && logits.stride(1) == 1 && beside(targets) && beside(row_scale) &&
          targets.scalar_type() == at::kLong && row_scale.scalar_type() == at::kFloat,
      "zero::softmax_cross_entropy_: the logits are no rows of numbers side by side, or the "
      "targets (int64) and scales (fp32) no arrays of as many beside them");
  const c10::cuda::CUDAGuard guard(logits.device());
  const auto indices = targets.contiguous();
  const auto scales = row_scale.contiguous();
  const auto losses = at::empty({rows}, logits.options().dtype(at::kDouble));
  softmax_cross_entropy({.logits = logits.mutable_data_ptr(),
                         .dtype = logits.scalar_type(),
                         .rows = rows,
                         .stride = logits.stride(0),
                         .vocabulary = logits.size(1),
                         .targets = indices.const_data_ptr<int64_t>(),
                         .scales = scales.const_data_ptr<float>(),
                         .losses = losses.mutable_data_ptr<double>(),
                         .smoothing = static_cast<float>(smoothing)},
                        gradient, c10::cuda::getCurrentCUDAStream());
  return losses.sum();
}

void check_beside(const at::Tensor& x, const at::Tensor& other) {
  TORCH_CHECK(
      x.is_contiguous() && other.is_contiguous() && other.numel() == x.numel() &&
          other.scalar_type() == x.scalar_type() && other.device() == x.device(),
      "an operator of libzero: the arrays are not contiguous, or not of one size and dtype");
}

at::Tensor tanh_gelu_on_cuda(const at::Tensor& x) {
  auto y = at::empty_like(x);
  check_beside(x, y);
  const c10::cuda::CUDAGuard guard(x.device());
  gelu(x.const_data_ptr(), nullptr, nullptr, y.mutable_data_ptr(), x.scalar_type(), x.numel(),
       c10::cuda::getCurrentCUDAStream());
  return y;
}

at::Tensor tanh_gelu_backward_on_cuda(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx,
                                      bool again) {
  check_beside(x, dy);
  check_beside(x, dx);
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = again ? at::empty_like(x) : at::empty({0}, x.options());
  gelu(x.const_data_ptr(), dy.const_data_ptr(), dx.mutable_data_ptr(),
       again ? y.mutable_data_ptr() : nullptr, x.scalar_type(), x.numel(),
       c10::cuda::getCurrentCUDAStream());
  return y;
}

void column_sums_on_cuda(at::Tensor& result, const at::Tensor& matrix) {
  const auto rows = matrix.size(0);
  const auto columns = matrix.size(1);
  TORCH_CHECK(matrix.is_contiguous() && result.is_contiguous() && result.numel() == columns &&
                  result.device() == matrix.device(),
              "zero::column_sums_: the matrix is not contiguous, or the result no array of as many "
              "numbers beside it");
  if (columns == 0) return;
  const c10::cuda::CUDAGuard guard(matrix.device());
  const auto parts =
      at::empty({column_sum_parts(rows), columns}, matrix.options().dtype(at::kFloat));
  column_sums(matrix.const_data_ptr(), matrix.scalar_type(), rows, columns,
              parts.mutable_data_ptr<float>(), result.mutable_data_ptr(), result.scalar_type(),
              c10::cuda::getCurrentCUDAStream());
}

/// The results of layer norm's forward pass; `sum` is that of x and `branch`, if there is one.
struct Normed {
  at::Tensor sum, y, mean, rstd;
};
Normed normed(const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight,
              const at::Tensor& bias, double eps) {
  const auto columns = x.size(1);
  const auto beside = [&](const at::Tensor& array) {
    return array.numel() == columns && array.is_contiguous() && array.device() == x.device() &&
           array.scalar_type() == x.scalar_type();
  };
  const bool adds = branch.defined();
  TORCH_CHECK(
      x.is_contiguous() && beside(weight) && beside(bias) &&
          (!adds || (branch.is_contiguous() && branch.sizes() == x.sizes() &&
                     branch.scalar_type() == x.scalar_type() && branch.device() == x.device())),
      "zero::layer_norm: the arrays do not go together");
  const c10::cuda::CUDAGuard guard(x.device());
  auto sum = adds ? at::empty_like(x) : at::Tensor();
  auto y = at::empty_like(x);
  auto mean = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  auto rstd = at::empty_like(mean);
  const bool fits = x.size(0) == 0 ||
                    layer_norm({.dy = nullptr,
                                .x = x.const_data_ptr(),
                                .weight = weight.const_data_ptr(),
                                .bias = bias.const_data_ptr(),
                                .branch = adds ? branch.const_data_ptr() : nullptr,
                                .mean = nullptr,
                                .rstd = nullptr,
                                .dx = nullptr,
                                .dweight = nullptr,
                                .dbias = nullptr,
                                .sum = adds ? sum.mutable_data_ptr() : nullptr,
                                .dtype = x.scalar_type(),
                                .rows = x.size(0),
                                .columns = columns},
                               eps, mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                               y.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream());
  if (fits) return {sum, y, mean, rstd};
  if (adds) at::add_out(sum, branch, x);
  auto [by_libtorch, its_mean, its_rstd] =
      at::native_layer_norm(adds ? sum : x, {columns}, weight, bias, eps);
  return {sum, by_libtorch, its_mean, its_rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_on_cuda(const at::Tensor& x,
                                                                  const at::Tensor& weight,
                                                                  const at::Tensor& bias,
                                                                  double eps) {
  const auto all = normed({}, x, weight, bias, eps);
  return {all.y, all.mean, all.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_on_cuda(
    const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    double eps) {
  const auto all = normed(branch, x, weight, bias, eps);
  return {all.sum, all.y, all.mean, all.rstd};
}

at::Tensor layer_norm_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x,
                                       const at::Tensor& mean, const at::Tensor& rstd,
                                       const at::Tensor& weight, at::Tensor& dweight,
                                       at::Tensor& dbias, const std::optional<at::Tensor>& more) {
  const auto rows = x.size(0);
  const auto columns = x.size(1);
  const auto is = [&](const at::Tensor& tensor, at::ScalarType dtype, int64_t numel) {
    return tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous() &&
           tensor.device() == x.device();
  };
  const auto dtype = x.scalar_type();
  TORCH_CHECK(is(x, dtype, rows * columns) && is(dy, dtype, rows * columns) &&
                  is(weight, dtype, columns) && is(dweight, dtype, columns) &&
                  is(dbias, dtype, columns) && is(mean, at::kFloat, rows) &&
                  is(rstd, at::kFloat, rows) && (!more || is(*more, dtype, rows * columns)),
              "zero::layer_norm_backward: the arrays do not go together");
  const c10::cuda::CUDAGuard guard(x.device());
  auto dx = at::empty_like(x);
  const auto parts = at::empty({2, layer_norm_parts(rows), columns}, x.options().dtype(at::kFloat));
  const bool fits =
      layer_norm_backward({.dy = dy.const_data_ptr(),
                           .x = x.const_data_ptr(),
                           .weight = weight.const_data_ptr(),
                           .bias = nullptr,
                           .more = more ? more->const_data_ptr() : nullptr,
                           .mean = mean.const_data_ptr<float>(),
                           .rstd = rstd.const_data_ptr<float>(),
                           .dx = dx.mutable_data_ptr(),
                           .dweight = dweight.mutable_data_ptr(),
                           .dbias = dbias.mutable_data_ptr(),
                           .dtype = dtype,
                           .rows = rows,
                           .columns = columns},
                          parts.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream());
  if (fits) return dx;
  const auto all = at::native_layer_norm_backward(
      dy, x, {columns}, mean.unsqueeze(1), rstd.unsqueeze(1), weight, dbias, {true, true, true});
  dweight.copy_(std::get<1>(all));
  dbias.copy_(std::get<2>(all));
  return more ? at::add(std::get<0>(all), *more) : std::get<0>(all);
}

using Branch = std::optional<at::Tensor>;

const void* pointer_of(const Branch& array) { return array ? array->const_data_ptr() : nullptr; }

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_on_cuda(const Branch& branch,
                                                                const at::Tensor& x,
                                                                const at::Tensor& weight,
                                                                double eps, bool and_one) {
  const auto columns = x.size(1);
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == columns &&
                  weight.scalar_type() == x.scalar_type() && weight.device() == x.device(),
              "zero::rms_norm: the arrays do not go together");
  if (branch) check_beside(x, *branch);
  const c10::cuda::CUDAGuard guard(x.device());
  auto sum = branch ? at::empty_like(x) : at::empty({0}, x.options());
  auto y = at::empty_like(x);
  auto root = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  const bool fits = x.size(0) == 0 || rms_norm({.dy = nullptr,
                                                .x = x.const_data_ptr(),
                                                .weight = weight.const_data_ptr(),
                                                .branch = pointer_of(branch),
                                                .more = nullptr,
                                                .root = root.mutable_data_ptr<float>(),
                                                .y = y.mutable_data_ptr(),
                                                .sum = branch ? sum.mutable_data_ptr() : nullptr,
                                                .dx = nullptr,
                                                .dweight = nullptr,
                                                .dtype = x.scalar_type(),
                                                .rows = x.size(0),
                                                .columns = columns,
                                                .and_one = and_one},
                                               eps, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(fits, "zero::rms_norm: rows of ", columns,
              " numbers are too wide, or an array does not begin at a multiple of 16 bytes");
  return {sum, y, root};
}

at::Tensor rms_norm_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x,
                                     const at::Tensor& root, const at::Tensor& weight, bool and_one,
                                     at::Tensor& dweight, const Branch& more) {
  const auto rows = x.size(0);
  const auto columns = x.size(1);
  check_beside(x, dy);
  if (more) check_beside(x, *more);
  TORCH_CHECK(root.numel() == rows && root.scalar_type() == at::kFloat && weight.is_contiguous() &&
                  dweight.is_contiguous() && weight.numel() == columns &&
                  dweight.numel() == columns && weight.scalar_type() == x.scalar_type() &&
                  dweight.scalar_type() == x.scalar_type(),
              "zero::rms_norm_backward: the arrays do not go together");
  const c10::cuda::CUDAGuard guard(x.device());
  auto dx = at::empty_like(x);
  const auto parts = at::empty({layer_norm_parts(rows), columns}, x.options().dtype(at::kFloat));
  const bool fits =
      rms_norm_backward({.dy = dy.const_data_ptr(),
                         .x = x.const_data_ptr(),
                         .weight = weight.const_data_ptr(),
                         .branch = nullptr,
                         .more = pointer_of(more),
                         .root = const_cast<float*>(root.const_data_ptr<float>()),
                         .y = nullptr,
                         .sum = nullptr,
                         .dx = dx.mutable_data_ptr(),
                         .dweight = dweight.mutable_data_ptr(),
                         .dtype = x.scalar_type(),
                         .rows = rows,
                         .columns = columns,
                         .and_one = and_one},
                        parts.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(fits, "zero::rms_norm_backward: rows of ", columns,
              " numbers are too wide, or an array does not begin at a multiple of 16 bytes");
  return dx;
}

at::Tensor gate_on_cuda(const at::Tensor& gated, const at::Tensor& up, bool gelu) {
  check_beside(gated, up);
  const c10::cuda::CUDAGuard guard(gated.device());
  auto y = at::empty_like(gated);
  gate({.gate = gated.const_data_ptr(),
        .up = up.const_data_ptr(),
        .dy = nullptr,
        .y = y.mutable_data_ptr(),
        .of_gate = nullptr,
        .of_up = nullptr},
       gelu, gated.scalar_type(), gated.numel(), c10::cuda::getCurrentCUDAStream());
  return y;
}

std::tuple<at::Tensor, at::Tensor> gate_backward_on_cuda(const at::Tensor& dy,
                                                         const at::Tensor& gated,
                                                         const at::Tensor& up, bool gelu) {
  check_beside(gated, up);
  check_beside(gated, dy);
  const c10::cuda::CUDAGuard guard(gated.device());
  auto of_gate = at::empty_like(gated);
  auto of_up = at::empty_like(up);
  gate({.gate = gated.const_data_ptr(),
        .up = up.const_data_ptr(),
        .dy = dy.const_data_ptr(),
        .y = nullptr,
        .of_gate = of_gate.mutable_data_ptr(),
        .of_up = of_up.mutable_data_ptr()},
       gelu, gated.scalar_type(), gated.numel(), c10::cuda::getCurrentCUDAStream());
  return {of_gate, of_up};
}

at::Tensor rotate_on_cuda(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                          bool back) {
  const auto width = x.size(3);
  TORCH_CHECK(x.is_contiguous() && cosines.is_contiguous() && sines.is_contiguous() &&
                  cosines.sizes() == sines.sizes() && cosines.scalar_type() == x.scalar_type() &&
                  sines.scalar_type() == x.scalar_type() && cosines.device() == x.device() &&
                  width % 2 == 0 && cosines.size(-1) == width && width > 0 &&
                  (x.size(0) * x.size(1)) % std::max<int64_t>(1, cosines.numel() / width) == 0,
              "zero::rotate: the heads and the table do not go together");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = at::empty_like(x);
  rotate({.x = x.const_data_ptr(),
          .cosines = cosines.const_data_ptr(),
          .sines = sines.const_data_ptr(),
          .y = y.mutable_data_ptr(),
          .count = x.size(0) * x.size(1) * x.size(2),
          .heads = x.size(2),
          .width = width,
          .positions = cosines.numel() / width,
          .back = back},
         x.scalar_type(), c10::cuda::getCurrentCUDAStream());
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(zero, CUDA, library) {
  library.impl("update_", &update_on_cuda);
  library.impl("squared_norm_", &squared_norm_on_cuda);
  library.impl("squared_norms_", &squared_norms_on_cuda);
  library.impl("softmax_cross_entropy_", &softmax_cross_entropy_on_cuda);
  library.impl("tanh_gelu", &tanh_gelu_on_cuda);
  library.impl("tanh_gelu_backward", &tanh_gelu_backward_on_cuda);
  library.impl("column_sums_", &column_sums_on_cuda);
  library.impl("layer_norm", &layer_norm_on_cuda);
  library.impl("add_layer_norm", &add_layer_norm_on_cuda);
  library.impl("layer_norm_backward", &layer_norm_backward_on_cuda);
  library.impl("rms_norm", &rms_norm_on_cuda);
  library.impl("rms_norm_backward", &rms_norm_backward_on_cuda);
  library.impl("gate", &gate_on_cuda);
  library.impl("gate_backward", &gate_backward_on_cuda);
  library.impl("rotate", &rotate_on_cuda);
}

}  // namespace zero::cuda
