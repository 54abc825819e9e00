// Launches of the functions in zero/models/layers/column_sums_elements.h and
// layer_norm_elements.h. How a matrix is divided depends on its sizes alone, so results repeat.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "plugins/cuda/kernels.h"
#include "zero/models/layers/column_sums_elements.h"
#include "zero/models/layers/layer_norm_elements.h"

namespace zero::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kRowLanes = 8;       // threads of a block that share columns
constexpr int kMostThreads = 512;  // of a row of layer norm
constexpr int kRowsAtOnce = 4;     // whose sums a block finds together

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

/// A block of kWarp packs of columns by kRowLanes rows; blockIdx.y is its part.
template <int kCount, class Numbers>
__global__ void __launch_bounds__(kWarp* kRowLanes)
    column_sums_kernel(const typename Numbers::Stored* matrix, int64_t rows, int64_t columns,
                       float* parts) {
  __shared__ packs::Pack<float, kCount> sums[kRowLanes][kWarp];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * kCount;
  const bool inside = column < columns;
  if (inside) {
    sums[threadIdx.y][threadIdx.x] = column_sums::of_rows<Numbers, kCount>(
        matrix, rows, columns, column, blockIdx.y * kRowLanes + threadIdx.y,
        static_cast<int64_t>(gridDim.y) * kRowLanes);
  }
  __syncthreads();
  if (!inside || threadIdx.y != 0) return;
  for (int i = 0; i < kCount; ++i) {
    float sum = 0;
    for (int lane = 0; lane < kRowLanes; ++lane) sum += sums[lane][threadIdx.x].values[i];
    parts[blockIdx.y * columns + column + i] = sum;
  }
}

/// A block of kWarp columns, whose parts kWarp threads add up; blockIdx.y is which of two results.
template <class Numbers>
__global__ void __launch_bounds__(kWarp* kWarp)
    parts_kernel(const float* parts, int64_t count, int64_t columns,
                 typename Numbers::Stored* first, typename Numbers::Stored* second) {
  __shared__ float sums[kWarp][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const auto* const mine = parts + blockIdx.y * count * columns;
  if (column < columns) {
    sums[threadIdx.y][threadIdx.x] =
        column_sums::of_parts(mine, count, columns, column, threadIdx.y, kWarp);
  }
  __syncthreads();
  if (column >= columns || threadIdx.y != 0) return;
  float sum = 0;
  for (int lane = 0; lane < kWarp; ++lane) sum += sums[lane][threadIdx.x];
  (blockIdx.y == 0 ? first : second)[column] = Numbers::narrow(sum);
}

template <class Numbers>
void add_parts(const float* parts, int64_t count, int64_t columns, void* first, void* second,
               cudaStream_t stream) {
  using Stored = typename Numbers::Stored;
  const dim3 blocks(static_cast<unsigned>(ceil_div(columns, kWarp)), second == nullptr ? 1 : 2);
  parts_kernel<Numbers><<<blocks, dim3(kWarp, kWarp), 0, stream>>>(
      parts, count, columns, static_cast<Stored*>(first), static_cast<Stored*>(second));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Numbers>
struct NormArrays {
  const typename Numbers::Stored *dy, *x, *weight, *more;  // more may be null
  const float *mean, *rstd;
  typename Numbers::Stored* dx;
  int64_t rows, columns;
};

/// All lanes get the sum over their warp.
__device__ float add_warp(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
  return value;
}

template <class Numbers>
struct NormForward {
  const typename Numbers::Stored *x, *weight, *bias, *branch;  // branch may be null
  typename Numbers::Stored *y, *sum;
  float *mean, *rstd;
  int64_t rows, columns;
  float eps;
};

/// A warp has a row of at most kPacks packs a lane.
template <class Numbers, int kPacks>
__global__ void __launch_bounds__(kWarp* kRowLanes)
    layer_norm_forward_kernel(const NormForward<Numbers> arrays) {
  constexpr int kCount = packs::kWidth<Numbers>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowLanes + threadIdx.y;
  if (row >= arrays.rows) return;  // all lanes of the warp
  const auto column = [&](int pack) {
    return (static_cast<int64_t>(pack) * kWarp + threadIdx.x) * kCount;
  };
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack)
      if (column(pack) < arrays.columns) f(pack);
  };
  packs::Pack<float, kCount> x[kPacks];
  each([&](int pack) {
    const int64_t at = row * arrays.columns + column(pack);
    auto stored = optim::device::load<kCount>(arrays.x + at);
    if (arrays.branch != nullptr) {
      stored = layer_norm_elements::added<Numbers, kCount>(
          optim::device::load<kCount>(arrays.branch + at), stored);
      optim::device::store(stored, arrays.sum + at);
    }
    x[pack] = packs::widened<Numbers, kCount>(stored);
  });
  const float one = 1.0F / static_cast<float>(arrays.columns);
  float sum = 0;
  each([&](int pack) { sum += layer_norm_elements::sum_of(x[pack]); });
  const float mean = add_warp(sum) * one;
  float squares = 0;
  each([&](int pack) { squares += layer_norm_elements::squares_of(x[pack], mean); });
  const float rstd = 1.0F / sqrtf(add_warp(squares) * one + arrays.eps);
  each([&](int pack) {
    const int64_t begin = column(pack);
    optim::device::store(
        layer_norm_elements::y_of<Numbers, kCount>(
            x[pack], mean, rstd, packs::widened<Numbers, kCount>(arrays.weight + begin),
            packs::widened<Numbers, kCount>(arrays.bias + begin)),
        arrays.y + row * arrays.columns + begin);
  });
  if (threadIdx.x != 0) return;
  arrays.mean[row] = mean;
  arrays.rstd[row] = rstd;
}

/// A block has a thread for each pack of columns, in whole warps.
template <class Numbers>
__global__ void __launch_bounds__(kMostThreads)
    layer_norm_kernel(const NormArrays<Numbers> arrays, float* parts) {
  using layer_norm_elements::Sums;
  constexpr int kCount = packs::kWidth<Numbers>;
  __shared__ Sums found[2][kRowsAtOnce][kMostThreads / kWarp];
  const int64_t column = static_cast<int64_t>(threadIdx.x) * kCount;
  const bool inside = column < arrays.columns;
  const int warps = blockDim.x / kWarp;
  packs::Pack<float, kCount> weight{};
  if (inside) weight = packs::widened<Numbers, kCount>(arrays.weight + column);
  layer_norm_elements::Gradients<kCount> gradients{};
  int turn = 0;  // so that nobody writes sums that others still read
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsAtOnce;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kRowsAtOnce; begin < arrays.rows;
       begin += step, turn ^= 1) {
    layer_norm_elements::Share<Numbers, kCount> shares[kRowsAtOnce];
    Sums sums[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int64_t row = begin + r;
      if (!inside || row >= arrays.rows) continue;
      const int64_t at = row * arrays.columns + column;
      shares[r] = {optim::device::load<kCount>(arrays.dy + at),
                   optim::device::load<kCount>(arrays.x + at), arrays.mean[row], arrays.rstd[row]};
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (inside && begin + r < arrays.rows)
        sums[r] = layer_norm_elements::add(shares[r], weight, gradients);
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        sums[r] = join(sums[r], {__shfl_xor_sync(0xFFFFFFFFU, sums[r].plain, distance),
                                 __shfl_xor_sync(0xFFFFFFFFU, sums[r].normed, distance)});
      }
      if (threadIdx.x % kWarp == 0) found[turn][r][threadIdx.x / kWarp] = sums[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int64_t row = begin + r;
      if (!inside || row >= arrays.rows) continue;
      Sums whole;
      for (int warp = 0; warp < warps; ++warp) whole = join(whole, found[turn][r][warp]);
      const int64_t at = row * arrays.columns + column;
      packs::Pack<float, kCount> more{};
      if (arrays.more != nullptr) more = packs::widened<Numbers, kCount>(arrays.more + at);
      optim::device::store(
          layer_norm_elements::dx_of(shares[r], weight, whole, arrays.columns, more),
          arrays.dx + at);
    }
  }
  if (!inside) return;
  auto* const of_weight = parts + blockIdx.x * arrays.columns + column;
  auto* const of_bias = of_weight + static_cast<int64_t>(gridDim.x) * arrays.columns;
  for (int i = 0; i < kCount; ++i) {
    of_weight[i] = gradients.weight.values[i];
    of_bias[i] = gradients.bias.values[i];
  }
}

}  // namespace

void add_parts(const float* parts, int64_t count, int64_t columns, void* first, void* second,
               c10::ScalarType dtype, cudaStream_t stream) {
  optim::device::with_numbers(dtype, [&](auto numbers) {
    add_parts<decltype(numbers)>(parts, count, columns, first, second, stream);
  });
}

int64_t column_sum_parts(int64_t rows) {
  constexpr int64_t kRowsOfAThread = 8, kMost = 128;
  return std::clamp(ceil_div(rows, kRowLanes * kRowsOfAThread), int64_t{1}, kMost);
}

void column_sums(const void* matrix, c10::ScalarType dtype, int64_t rows, int64_t columns,
                 float* parts, void* sums, c10::ScalarType sums_dtype, cudaStream_t stream) {
  const auto count = column_sum_parts(rows);
  optim::device::with_numbers(dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const auto* const typed = static_cast<const typename Numbers::Stored*>(matrix);
    const auto launch = [&](auto width) {
      constexpr int kCount = decltype(width)::value;
      const dim3 blocks(static_cast<unsigned>(ceil_div(columns, int64_t{kWarp} * kCount)),
                        static_cast<unsigned>(count));
      column_sums_kernel<kCount, Numbers>
          <<<blocks, dim3(kWarp, kRowLanes), 0, stream>>>(typed, rows, columns, parts);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    constexpr int kWidth = packs::kWidth<Numbers>;
    if (packs::aligned(typed) && columns % kWidth == 0) {
      launch(std::integral_constant<int, kWidth>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
  optim::device::with_numbers(sums_dtype, [&](auto numbers) {
    add_parts<decltype(numbers)>(parts, count, columns, sums, nullptr, stream);
  });
}

bool layer_norm(const NormRows& rows, double eps, float* mean, float* rstd, void* y,
                cudaStream_t stream) {
  bool fits = false;
  optim::device::with_numbers(rows.dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Stored = typename Numbers::Stored;
    constexpr int kCount = packs::kWidth<Numbers>;
    const NormForward<Numbers> arrays{static_cast<const Stored*>(rows.x),
                                      static_cast<const Stored*>(rows.weight),
                                      static_cast<const Stored*>(rows.bias),
                                      static_cast<const Stored*>(rows.branch),
                                      static_cast<Stored*>(y),
                                      static_cast<Stored*>(rows.sum),
                                      mean,
                                      rstd,
                                      rows.rows,
                                      rows.columns,
                                      static_cast<float>(eps)};
    if (rows.columns % kCount != 0 ||
        !packs::aligned(arrays.x, arrays.weight, arrays.bias, arrays.branch, arrays.y, arrays.sum))
      return;
    const auto blocks = static_cast<unsigned>(ceil_div(rows.rows, kRowLanes));
    const auto packs_of_lane = ceil_div(rows.columns, int64_t{kWarp} * kCount);
    const auto launch = [&](auto most) {
      constexpr int kPacks = decltype(most)::value;
      if (fits || packs_of_lane > kPacks) return;
      fits = true;
      layer_norm_forward_kernel<Numbers, kPacks>
          <<<blocks, dim3(kWarp, kRowLanes), 0, stream>>>(arrays);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    launch(std::integral_constant<int, 1>());
    launch(std::integral_constant<int, 2>());
    launch(std::integral_constant<int, 3>());
    launch(std::integral_constant<int, 4>());
    launch(std::integral_constant<int, 6>());
    launch(std::integral_constant<int, 8>());
  });
  return fits;
}

int64_t layer_norm_parts(int64_t rows) {
  constexpr int64_t kMost = 528;  // four blocks for each multiprocessor of an H100
  return std::clamp(ceil_div(rows, kRowsAtOnce), int64_t{1}, kMost);
}

bool layer_norm_backward(const NormRows& rows, float* parts, cudaStream_t stream) {
  bool fits = false;
  optim::device::with_numbers(rows.dtype, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Stored = typename Numbers::Stored;
    constexpr int kCount = packs::kWidth<Numbers>;
    const auto threads = ceil_div(ceil_div(rows.columns, kCount), kWarp) * kWarp;
    const NormArrays<Numbers> arrays{static_cast<const Stored*>(rows.dy),
                                     static_cast<const Stored*>(rows.x),
                                     static_cast<const Stored*>(rows.weight),
                                     static_cast<const Stored*>(rows.more),
                                     rows.mean,
                                     rows.rstd,
                                     static_cast<Stored*>(rows.dx),
                                     rows.rows,
                                     rows.columns};
    fits = threads <= kMostThreads && rows.columns % kCount == 0 &&
           packs::aligned(arrays.dy, arrays.x, arrays.weight, arrays.more, arrays.dx);
    if (!fits) return;
    const auto count = layer_norm_parts(rows.rows);
    layer_norm_kernel<Numbers>
        <<<static_cast<unsigned>(count), static_cast<unsigned>(threads), 0, stream>>>(arrays,
                                                                                      parts);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    add_parts<Numbers>(parts, count, rows.columns, rows.dweight, rows.dbias, stream);
  });
  return fits;
}

}  // namespace zero::cuda
