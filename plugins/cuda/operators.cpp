// The operators of zero/optim for CUDA tensors: see Note [Kernels of a device] in operators.h. They
// are registered when this library is loaded.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "plugins/cuda/kernels.h"
#include "zero/optim/operators.h"

namespace zero::cuda {
namespace {

void update_on_cuda(const c10::intrusive_ptr<optim::UpdateCall>& call, const at::Tensor& gradient,
                    const at::Tensor& master, const std::optional<at::Tensor>& parameter,
                    at::TensorList states) {
  const auto range = optim::range_of(*call, gradient, master, parameter, states);
  const c10::cuda::CUDAGuard guard(gradient.device());
  update(call->optimizer, {call->step, call->lr}, static_cast<float>(call->gradient_scale), range,
         c10::cuda::getCurrentCUDAStream());
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

}  // namespace

TORCH_LIBRARY_IMPL(zero, CUDA, library) {
  library.impl("update_", &update_on_cuda);
  library.impl("squared_norm_", &squared_norm_on_cuda);
}

}  // namespace zero::cuda
