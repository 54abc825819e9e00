// Launches of the functions in zero/optim/device_elements.h: see Note [Kernels in plain C++] there.
// No result depends on the launch: a thread's elements do not meet another's, and the order of a
// norm's additions is that of its blocks and lanes.
#include <c10/cuda/CUDAException.h>

#include "plugins/cuda/kernels.h"
#include "zero/optim/device_elements.h"

namespace zero::cuda {

using optim::device::NormArrays;

namespace {

using optim::kernels::kNormBlock;
using optim::kernels::kNormLanes;

constexpr int kThreads = 256;
/// Blocks of a norm that a thread block sums up, each by a warp whose threads are its lanes.
constexpr int kWarps = 4;
constexpr int kWarp = 32;
static_assert(kNormLanes == kWarp);

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

template <int kCount, class Step, class Arrays>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const Step step, optim::device::Scale scale, const Arrays arrays) {
  optim::device::update_by_thread<kCount>(step, scale, arrays, thread_index());
}

template <class Numbers>
__global__ void __launch_bounds__(kWarps* kWarp) norm_kernel(const NormArrays given, double* sums) {
  __shared__ double partial[kWarps][kNormLanes];
  const auto warp = threadIdx.x / kWarp;
  const auto lane = threadIdx.x % kWarp;
  const int64_t block = thread_index() / kWarp;
  if (block >= given.blocks) return;  // all lanes of the warp
  const auto& array = given.arrays[given.of_block(block)];
  const int64_t begin = (block - array.first_block) * kNormBlock;
  const int64_t count = array.numel - begin < kNormBlock ? array.numel - begin : kNormBlock;
  partial[warp][lane] = optim::device::lane_squares<Numbers>(
      static_cast<const typename Numbers::Stored*>(array.values) + begin, count, lane);
  __syncwarp();
  if (lane == 0) sums[block] = optim::device::add_in_order(0, partial[warp], kNormLanes);
}

/// A thread block for each array: its threads fetch the sums of blocks, and one of them adds these.
__global__ void __launch_bounds__(kThreads)
    norm_total_kernel(const NormArrays given, const NormRowNumbers rows, const double* all,
                      double* results) {
  __shared__ double fetched[kThreads];
  const int array = static_cast<int>(blockIdx.x);
  const auto* const sums = all + given.arrays[array].first_block;
  const int64_t count = given.blocks_of(array);
  auto* const into = results + int64_t{2} * rows.rows[array];
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kThreads) {
    const int64_t rest = count - begin < kThreads ? count - begin : kThreads;
    if (threadIdx.x < rest) fetched[threadIdx.x] = sums[begin + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) total = optim::device::add_in_order(total, fetched, rest);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  into[0] = total;
  // A sum of squares of finite numbers is finite: squared_norm in optimizer.cpp.
  into[1] = isfinite(total) ? 0 : 1;
}

}  // namespace

void update(const Optimizer& optimizer, optim::Moment moment, float gradient_scale,
            const optim::Operands& operands, cudaStream_t stream) {
  if (operands.numel == 0) return;
  const optim::device::Scale scale{gradient_scale, operands.gradient_limit};
  optim::device::with_update(
      optimizer, moment, operands, [&](auto width, const auto& step, const auto& arrays) {
        constexpr int kCount = decltype(width)::value;
        const auto blocks = ceil_div(operands.numel, int64_t{kThreads} * kCount);
        update_kernel<kCount>
            <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(step, scale, arrays);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
}

int64_t norm_blocks(int64_t numel) { return ceil_div(numel, kNormBlock); }

void squared_norm(const void* values, c10::ScalarType dtype, int64_t numel, double* workspace,
                  double* sums, cudaStream_t stream) {
  NormArrays one;
  one.add(values, numel);
  squared_norms(one, dtype, {}, workspace, sums, stream);
}

void squared_norms(const NormArrays& arrays, c10::ScalarType dtype, const NormRowNumbers& rows,
                   double* workspace, double* sums, cudaStream_t stream) {
  if (arrays.count == 0) return;
  if (arrays.blocks > 0) {
    optim::device::with_numbers(dtype, [&](auto numbers) {
      const auto groups = static_cast<unsigned>(ceil_div(arrays.blocks, kWarps));
      norm_kernel<decltype(numbers)><<<groups, kWarps * kWarp, 0, stream>>>(arrays, workspace);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  norm_total_kernel<<<static_cast<unsigned>(arrays.count), kThreads, 0, stream>>>(arrays, rows,
                                                                                  workspace, sums);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace zero::cuda
