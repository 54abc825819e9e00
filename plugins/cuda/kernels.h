// The kernels of this plugin, for memory of a CUDA device. Each is enqueued on `stream`, and
// nothing waits. Throws what C10_CUDA_CHECK throws where CUDA refuses a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "zero/optim/device_elements.h"
#include "zero/optim/moment.h"
#include "zero/optim/narrow.h"
#include "zero/optim/optimizer.h"

namespace zero::cuda {

/// Does the same as optim::update of an element-wise optimizer, or a sweep of Muon, with the same
/// bits.
void update(const Optimizer& optimizer, optim::Moment moment, float gradient_scale,
            const optim::Operands& operands, cudaStream_t stream);
/// Does the same as optim::update of narrow operands.
void update(const Optimizer& optimizer, optim::Moment moment, float gradient_scale,
            const optim::NarrowOperands& operands, cudaStream_t stream);

/// The rows of the results of several norms.
struct NormRowNumbers {
  int32_t rows[optim::device::NormArrays::kMost];
};

/// The number of blocks of an array of `numel` elements. squared_norm writes the sum of each block
/// into its workspace.
int64_t norm_blocks(int64_t numel);

/// Calculates the bits that optim::squared_norm calculates. Writes two numbers into `sums`: the
/// sum, and 0 if it is finite, else 1. `workspace` has norm_blocks(numel) places.
void squared_norm(const void* values, c10::ScalarType dtype, int64_t numel, double* workspace,
                  double* sums, cudaStream_t stream);

/// Does the same for up to NormArrays::kMost arrays of one dtype at once: `sums` has two numbers
/// for each, those of array i at 2 rows[i]. `workspace` has a place for each of their blocks.
void squared_norms(const optim::device::NormArrays& arrays, c10::ScalarType dtype,
                   const NormRowNumbers& rows, double* workspace, double* sums,
                   cudaStream_t stream);

/// `rows` rows of logits, each of which begins `stride` elements behind the one before.
struct LogitRows {
  void* logits;
  c10::ScalarType dtype;
  int64_t rows, stride, vocabulary;
  const int64_t* targets;
  const float* scales;
  double* losses;
  float smoothing;
};

/// Does the same as softmax_cross_entropy_ of zero/models/layers/softmax.h, with a loss for each
/// row. A target outside of the vocabulary stops the device by an assertion, as in LibTorch's
/// losses.
void softmax_cross_entropy(const LogitRows& rows, bool gradient, cudaStream_t stream);

/// The GELU of zero/models/layers/gelu.h. Without `dy` it writes y = gelu(x). With `dy` it writes
/// dx = dy gelu'(x), and y = gelu(x) too if `y` is not null; `dx` may be `dy`. Each array has
/// `numel` numbers.
void gelu(const void* x, const void* dy, void* dx, void* y, c10::ScalarType dtype, int64_t numel,
          cudaStream_t stream);

/// Adds `count` rows of parts, of as many columns each, to `first`, and as many behind them to
/// `second` if it is not null. Both have numbers of `dtype`.
void add_parts(const float* parts, int64_t count, int64_t columns, void* first, void* second,
               c10::ScalarType dtype, cudaStream_t stream);

/// The sums of the columns of a matrix without gaps. `parts` has column_sum_parts(rows) rows of as
/// many columns.
int64_t column_sum_parts(int64_t rows);
void column_sums(const void* matrix, c10::ScalarType dtype, int64_t rows, int64_t columns,
                 float* parts, void* sums, c10::ScalarType sums_dtype, cudaStream_t stream);

/// The rows that layer norm reads and writes, without gaps; `dy` and what follows `rstd` in
/// backward alone, `bias` forward alone. With `branch` (forward) the norm is of x + branch, which
/// is written to `sum`. With `more` (backward) that is added to dx.
struct NormRows {
  const void *dy, *x, *weight, *bias;
  const void *branch = nullptr, *more = nullptr;
  const float *mean, *rstd;
  void *dx, *dweight, *dbias;
  void* sum = nullptr;
  c10::ScalarType dtype;
  int64_t rows, columns;
};

/// Layer norm: y, and mean and 1 / deviation of each row; false, and nothing is enqueued, where the
/// rows are too wide or do not begin at multiples of 16 bytes.
bool layer_norm(const NormRows& rows, double eps, float* mean, float* rstd, void* y,
                cudaStream_t stream);

/// The backward pass of layer norm; false, and nothing is enqueued, where the rows are too wide or
/// do not begin at multiples of 16 bytes. `parts` has 2 layer_norm_parts(rows) rows of as many
/// columns.
int64_t layer_norm_parts(int64_t rows);
bool layer_norm_backward(const NormRows& rows, float* parts, cudaStream_t stream);

/// The rows that RMS norm reads and writes, without gaps; `root` has a number for each row. What
/// NormRows has of the same names is the same here.
struct RmsRows {
  const void *dy, *x, *weight, *branch, *more;
  float* root;
  void *y, *sum, *dx, *dweight;
  c10::ScalarType dtype;
  int64_t rows, columns;
  bool and_one;
};
/// Both are false, and nothing is enqueued, where the rows are too wide or do not begin at
/// multiples of 16 bytes. `parts` has layer_norm_parts(rows) rows of as many columns.
bool rms_norm(const RmsRows& rows, double eps, cudaStream_t stream);
bool rms_norm_backward(const RmsRows& rows, float* parts, cudaStream_t stream);

/// The gates of zero/models/layers/swiglu.h, of `numel` numbers each. Without `dy` it writes y.
/// With `dy` it writes the gradients of gate and up.
struct GateArrays {
  const void *gate, *up, *dy;
  void *y, *of_gate, *of_up;
};
void gate(const GateArrays& arrays, bool gelu, c10::ScalarType dtype, int64_t numel,
          cudaStream_t stream);

/// The rotation of zero/models/layers/rotary.h: rotary_elements::Heads without types.
struct RotaryHeads {
  const void *x, *cosines, *sines;
  void* y;
  int64_t count, heads, width, positions;
  bool back;
};
void rotate(const RotaryHeads& heads, c10::ScalarType dtype, cudaStream_t stream);

}  // namespace zero::cuda
