// Launches of the functions in zero/models/layers/rms_norm_elements.h, gate_elements.h and
// rotary_elements.h. How rows are divided depends on their sizes alone, so results repeat.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "plugins/cuda/device_math.h"
#include "plugins/cuda/kernels.h"
#include "zero/models/layers/gate_elements.h"
#include "zero/models/layers/layer_norm_elements.h"
#include "zero/models/layers/rms_norm_elements.h"
#include "zero/models/layers/rotary_elements.h"

namespace zero::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;  // of a row
constexpr int kThreads = 256;       // of a block that has no rows

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

/// All threads of the block get the sum. `found` has a place for each warp, and is read until all
/// threads are past the next barrier.
__device__ float add_block(float value, float* found) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) sum += found[warp];
  return sum;
}

template <class Numbers>
struct RmsArrays {
  const typename Numbers::Stored *dy, *x, *weight, *branch, *more;  // the last two may be null
  float* root;
  typename Numbers::Stored *y, *sum, *dx;
  int64_t rows, columns;
  float eps;
  bool and_one;
};

/// A block has a row, and a thread one pack of it.
template <class Numbers>
__global__ void __launch_bounds__(kMostThreads) rms_norm_kernel(const RmsArrays<Numbers> arrays) {
  constexpr int kCount = packs::kWidth<Numbers>;
  __shared__ float found[kMostThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t column = static_cast<int64_t>(threadIdx.x) * kCount;
  const bool inside = column < arrays.columns;
  const int64_t at = row * arrays.columns + column;
  packs::Pack<float, kCount> x{};
  if (inside) {
    auto stored = optim::device::load<kCount>(arrays.x + at);
    if (arrays.branch != nullptr) {
      stored = layer_norm_elements::added<Numbers, kCount>(
          optim::device::load<kCount>(arrays.branch + at), stored);
      optim::device::store(stored, arrays.sum + at);
    }
    x = packs::widened<Numbers, kCount>(stored);
  }
  const float squares = add_block(rms_norm_elements::squares_of(x), found);
  const float root = 1.0F / sqrtf(squares / static_cast<float>(arrays.columns) + arrays.eps);
  if (threadIdx.x == 0) arrays.root[row] = root;
  if (!inside) return;
  optim::device::store(
      rms_norm_elements::y_of<Numbers, kCount>(
          x, root, packs::widened<Numbers, kCount>(arrays.weight + column), arrays.and_one),
      arrays.y + at);
}

/// A block visits many rows, and a thread has one pack of columns.
template <class Numbers>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_backward_kernel(const RmsArrays<Numbers> arrays, float* parts) {
  constexpr int kCount = packs::kWidth<Numbers>;
  __shared__ float found[2][kMostThreads / kWarp];
  const int64_t column = static_cast<int64_t>(threadIdx.x) * kCount;
  const bool inside = column < arrays.columns;
  packs::Pack<float, kCount> weight{}, gradients{};
  if (inside) weight = packs::widened<Numbers, kCount>(arrays.weight + column);
  int turn = 0;  // so that nobody writes sums that others still read
  for (int64_t row = blockIdx.x; row < arrays.rows; row += gridDim.x, turn ^= 1) {
    const int64_t at = row * arrays.columns + column;
    const float root = arrays.root[row];
    packs::Pack<float, kCount> dy{}, x{}, more{};
    float sum = 0;
    if (inside) {
      dy = packs::widened<Numbers, kCount>(arrays.dy + at);
      x = packs::widened<Numbers, kCount>(arrays.x + at);
      if (arrays.more != nullptr) more = packs::widened<Numbers, kCount>(arrays.more + at);
      sum = rms_norm_elements::add<Numbers>(dy, x, root, weight, arrays.and_one, gradients);
    }
    sum = add_block(sum, found[turn]);
    if (!inside) continue;
    optim::device::store(rms_norm_elements::dx_of<Numbers>(dy, x, root, weight, arrays.and_one, sum,
                                                           arrays.columns, more),
                         arrays.dx + at);
  }
  if (!inside) return;
  for (int i = 0; i < kCount; ++i)
    parts[static_cast<int64_t>(blockIdx.x) * arrays.columns + column + i] = gradients.values[i];
}

template <class Numbers, class Launch>
bool with_rows(const RmsRows& rows, double eps, const Launch& launch) {
  using Stored = typename Numbers::Stored;
  constexpr int kCount = packs::kWidth<Numbers>;
  const RmsArrays<Numbers> arrays{static_cast<const Stored*>(rows.dy),
                                  static_cast<const Stored*>(rows.x),
                                  static_cast<const Stored*>(rows.weight),
                                  static_cast<const Stored*>(rows.branch),
                                  static_cast<const Stored*>(rows.more),
                                  rows.root,
                                  static_cast<Stored*>(rows.y),
                                  static_cast<Stored*>(rows.sum),
                                  static_cast<Stored*>(rows.dx),
                                  rows.rows,
                                  rows.columns,
                                  static_cast<float>(eps),
                                  rows.and_one};
  const auto threads = ceil_div(ceil_div(rows.columns, kCount), kWarp) * kWarp;
  const bool fits = threads <= kMostThreads && rows.columns % kCount == 0 &&
                    packs::aligned(arrays.dy, arrays.x, arrays.weight, arrays.branch, arrays.more,
                                   arrays.y, arrays.sum, arrays.dx);
  if (fits) launch(arrays, static_cast<unsigned>(threads));
  return fits;
}

template <class Numbers>
struct TypedGate {
  const typename Numbers::Stored *gate, *up, *dy;
  typename Numbers::Stored *y, *of_gate, *of_up;
};

template <class Numbers, int kCount>
__device__ void work_on(const TypedGate<Numbers>& arrays, bool gelu, int64_t begin) {
  const auto gate = optim::device::load<kCount>(arrays.gate + begin);
  const auto up = optim::device::load<kCount>(arrays.up + begin);
  if (arrays.dy == nullptr) {
    optim::device::store(gate_elements::values<DeviceMath, Numbers, kCount>(gate, up, gelu),
                         arrays.y + begin);
    return;
  }
  const auto found = gate_elements::backward<DeviceMath, Numbers, kCount>(
      optim::device::load<kCount>(arrays.dy + begin), gate, up, gelu);
  optim::device::store(found.gate, arrays.of_gate + begin);
  optim::device::store(found.up, arrays.of_up + begin);
}

template <class Numbers, int kCount>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(const TypedGate<Numbers> arrays, bool gelu, int64_t numel) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (begin + kCount <= numel) {
    work_on<Numbers, kCount>(arrays, gelu, begin);
  } else {
    for (int64_t i = begin; i < numel; ++i) work_on<Numbers, 1>(arrays, gelu, i);
  }
}

template <int kCount, class Numbers>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const rotary_elements::Heads<Numbers> heads) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index < rotary_elements::packs_of<kCount>(heads)) rotary_elements::turn<kCount>(heads, index);
}

}  // namespace

bool rms_norm(const RmsRows& rows, double eps, cudaStream_t stream) {
  bool fits = false;
  optim::device::with_numbers(rows.dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    fits = with_rows<Numbers>(rows, eps, [&](const auto& arrays, unsigned threads) {
      rms_norm_kernel<Numbers><<<static_cast<unsigned>(rows.rows), threads, 0, stream>>>(arrays);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return fits;
}

bool rms_norm_backward(const RmsRows& rows, float* parts, cudaStream_t stream) {
  bool fits = false;
  optim::device::with_numbers(rows.dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    fits = with_rows<Numbers>(rows, 0, [&](const auto& arrays, unsigned threads) {
      rms_norm_backward_kernel<Numbers>
          <<<static_cast<unsigned>(layer_norm_parts(rows.rows)), threads, 0, stream>>>(arrays,
                                                                                       parts);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  if (fits) {
    add_parts(parts, layer_norm_parts(rows.rows), rows.columns, rows.dweight, nullptr, rows.dtype,
              stream);
  }
  return fits;
}

void gate(const GateArrays& given, bool gelu, c10::ScalarType dtype, int64_t numel,
          cudaStream_t stream) {
  if (numel == 0) return;
  optim::device::with_numbers(dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Stored = typename Numbers::Stored;
    const TypedGate<Numbers> arrays{
        static_cast<const Stored*>(given.gate), static_cast<const Stored*>(given.up),
        static_cast<const Stored*>(given.dy),   static_cast<Stored*>(given.y),
        static_cast<Stored*>(given.of_gate),    static_cast<Stored*>(given.of_up)};
    const auto launch = [&](auto width) {
      constexpr int kCount = decltype(width)::value;
      gate_kernel<Numbers, kCount>
          <<<static_cast<unsigned>(ceil_div(numel, int64_t{kThreads} * kCount)), kThreads, 0,
             stream>>>(arrays, gelu, numel);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (packs::aligned(arrays.gate, arrays.up, arrays.dy, arrays.y, arrays.of_gate, arrays.of_up)) {
      launch(std::integral_constant<int, packs::kWidth<Numbers>>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
}

void rotate(const RotaryHeads& given, c10::ScalarType dtype, cudaStream_t stream) {
  if (given.count == 0 || given.width == 0) return;
  optim::device::with_numbers(dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Stored = typename Numbers::Stored;
    const rotary_elements::Heads<Numbers> heads{
        .x = static_cast<const Stored*>(given.x),
        .y = static_cast<Stored*>(given.y),
        .cosines = static_cast<const Stored*>(given.cosines),
        .sines = static_cast<const Stored*>(given.sines),
        .count = given.count,
        .heads = given.heads,
        .width = given.width,
        .positions = given.positions,
        .back = given.back};
    const auto launch = [&](auto width) {
      constexpr int kCount = decltype(width)::value;
      const auto blocks = ceil_div(rotary_elements::packs_of<kCount>(heads), kThreads);
      rotate_kernel<kCount><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(heads);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    constexpr int kWidth = packs::kWidth<Numbers>;
    if (given.width / 2 % kWidth == 0 &&
        packs::aligned(heads.x, heads.y, heads.cosines, heads.sines)) {
      launch(std::integral_constant<int, kWidth>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace zero::cuda
