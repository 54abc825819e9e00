// Launches of the functions in zero/models/layers/gelu_elements.h: a thread has a pack.
#include <c10/cuda/CUDAException.h>

#include "plugins/cuda/device_math.h"
#include "plugins/cuda/kernels.h"
#include "zero/models/layers/gelu_elements.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;

template <class Numbers>
struct Arrays {
  const typename Numbers::Stored *x, *dy;  // without dy: forward
  typename Numbers::Stored *dx, *y;        // y may be absent in backward
};

template <class Numbers, int kCount>
__device__ void work_on(const Arrays<Numbers>& arrays, int64_t begin) {
  const auto x = optim::device::load<kCount>(arrays.x + begin);
  if (arrays.dy == nullptr) {
    optim::device::store(gelu_elements::values<DeviceMath, Numbers, kCount>(x), arrays.y + begin);
    return;
  }
  const auto found = gelu_elements::backward<DeviceMath, Numbers, kCount>(
      x, optim::device::load<kCount>(arrays.dy + begin));
  optim::device::store(found.dx, arrays.dx + begin);
  if (arrays.y != nullptr) optim::device::store(found.y, arrays.y + begin);
}

template <class Numbers, int kCount>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(const Arrays<Numbers> arrays, int64_t numel) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (begin + kCount <= numel) {
    work_on<Numbers, kCount>(arrays, begin);
  } else {
    for (int64_t i = begin; i < numel; ++i) work_on<Numbers, 1>(arrays, i);
  }
}

}  // namespace

void gelu(const void* x, const void* dy, void* dx, void* y, c10::ScalarType dtype, int64_t numel,
          cudaStream_t stream) {
  if (numel == 0) return;
  optim::device::with_numbers(dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Stored = typename Numbers::Stored;
    const Arrays<Numbers> arrays{static_cast<const Stored*>(x), static_cast<const Stored*>(dy),
                                 static_cast<Stored*>(dx), static_cast<Stored*>(y)};
    const auto launch = [&](auto width) {
      constexpr int kCount = decltype(width)::value;
      const auto blocks = (numel + int64_t{kThreads} * kCount - 1) / (int64_t{kThreads} * kCount);
      gelu_kernel<Numbers, kCount>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arrays, numel);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (packs::aligned(arrays.x, arrays.dy, arrays.dx, arrays.y)) {
      launch(std::integral_constant<int, packs::kWidth<Numbers>>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace zero::cuda
