// Updates of bf16 weights that are their own master weights, and of states in bf16 or 8 bits:
// launches of update_narrow_by_thread in zero/optim/device_elements.h, as in kernels.cu. They are
// many kernels, which compile beside the others.
#include <c10/cuda/CUDAException.h>

#include "plugins/cuda/kernels.h"
#include "zero/optim/device_elements.h"

namespace zero::cuda {

namespace {

constexpr int kThreads = 128;

template <int kCount, class Step, class Arrays>
__global__ void __launch_bounds__(kThreads)
    narrow_update_kernel(const Step step, optim::device::Scale scale, const Arrays arrays) {
  const auto index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  optim::device::update_narrow_by_thread<kCount>(step, scale, arrays, index);
}

}  // namespace

void update(const Optimizer& optimizer, optim::Moment moment, float gradient_scale,
            const optim::NarrowOperands& operands, cudaStream_t stream) {
  const optim::device::Scale scale{gradient_scale, operands.wide.gradient_limit};
  optim::device::with_narrow_update(
      optimizer, moment, operands, [&](auto width, const auto& step, const auto& arrays) {
        constexpr int kCount = decltype(width)::value;
        using Arrays = std::remove_cvref_t<decltype(arrays)>;
        const int64_t of_block = kThreads * optim::device::narrow_elements<Arrays>(kCount);
        const auto blocks = (arrays.numel + of_block - 1) / of_block;
        narrow_update_kernel<kCount>
            <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(step, scale, arrays);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
}

}  // namespace zero::cuda
