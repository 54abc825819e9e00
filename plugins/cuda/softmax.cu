// Launches of the functions in zero/models/layers/softmax_elements.h: a thread block has a row.
#include <c10/cuda/CUDAException.h>

#include "plugins/cuda/device_math.h"
#include "plugins/cuda/kernels.h"
#include "zero/models/layers/softmax.h"
#include "zero/models/layers/softmax_elements.h"

namespace zero::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = kWarp * kWarp;  // so that one warp joins what the warps found
// Threads that a multiprocessor of the device holds: 2048 on 8.0, 9.0 and 10.0; 1536 on 8.6, 8.9
// and 12.0. (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".)
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ % 100 != 0 || __CUDA_ARCH__ >= 1200)
constexpr int kThreadsAtOnce = 1536;
#else
constexpr int kThreadsAtOnce = 2048;
#endif
// A multiprocessor works on as many rows at a time as it has threads for: the rows stay in the
// cache of the device until they are read again.
constexpr int kBlocksAtOnce = kThreadsAtOnce / kThreads;

/// All lanes get the part of their warp, of the same bits.
__device__ softmax::Part join_warp(softmax::Part part) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const softmax::Part other{__shfl_xor_sync(0xFFFFFFFFU, part.largest, distance),
                              __shfl_xor_sync(0xFFFFFFFFU, part.sum, distance),
                              __shfl_xor_sync(0xFFFFFFFFU, part.total, distance)};
    part = softmax::join<DeviceMath>(part, other);
  }
  return part;
}

template <int kCount, class Numbers>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    softmax_kernel(const softmax::Rows<Numbers> rows, bool gradient) {
  __shared__ softmax::Part parts[kWarp];
  const int64_t number = blockIdx.x;
  auto* const row = rows.logits + number * rows.stride;
  const int64_t target = rows.targets[number];
  if (target == kIgnoredTarget) {  // for the whole block
    if (threadIdx.x == 0) rows.losses[number] = 0;
    if (gradient)
      softmax::write_zeros<Numbers, kCount>(row, rows.vocabulary, threadIdx.x, kThreads);
    return;
  }
  CUDA_KERNEL_ASSERT(target >= 0 && target < rows.vocabulary);
  const auto part = join_warp(
      softmax::part_of<DeviceMath, Numbers, kCount>(row, rows.vocabulary, threadIdx.x, kThreads));
  const float chosen = Numbers::widen(row[target]);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = part;
  __syncthreads();  // nobody writes before all have read
  const auto whole = join_warp(parts[threadIdx.x % kWarp]);
  if (threadIdx.x == 0) rows.losses[number] = softmax::loss<DeviceMath>(rows, whole, chosen);
  if (!gradient) return;
  softmax::write_gradient<DeviceMath, Numbers, kCount>(rows, number, threadIdx.x, kThreads, whole);
}

}  // namespace

void softmax_cross_entropy(const LogitRows& rows, bool gradient, cudaStream_t stream) {
  if (rows.rows == 0) return;
  optim::device::with_numbers(rows.dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const softmax::Rows<Numbers> typed{
        .logits = static_cast<typename Numbers::Stored*>(rows.logits),
        .stride = rows.stride,
        .vocabulary = rows.vocabulary,
        .targets = rows.targets,
        .scales = rows.scales,
        .losses = rows.losses,
        .smoothing = rows.smoothing};
    softmax::with_width(typed, [&](auto width) {
      constexpr int kCount = decltype(width)::value;
      softmax_kernel<kCount, Numbers>
          <<<static_cast<unsigned>(rows.rows), kThreads, 0, stream>>>(typed, gradient);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace zero::cuda
