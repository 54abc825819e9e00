// The kernels of this plugin: those of `zero/optim` for memory of a CUDA device. Each is enqueued
// on `stream`, and nothing waits. Throws what C10_CUDA_CHECK throws where CUDA refuses a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "zero/optim/moment.h"
#include "zero/optim/optimizer.h"

namespace zero::cuda {

/// As optim::update of an element-wise optimizer and whole master weights, with the same bits.
void update(const Optimizer& optimizer, optim::Moment moment, float gradient_scale,
            const optim::Range& range, cudaStream_t stream);

/// Blocks of `numel` elements, each of which has a sum in the workspace of squared_norm.
int64_t norm_blocks(int64_t numel);

/// As optim::squared_norm, with the same bits: the sum, and 0, or 1 where it is not finite, into
/// `sums`. `workspace` has norm_blocks(numel) places.
void squared_norm(const void* values, c10::ScalarType dtype, int64_t numel, double* workspace,
                  double* sums, cudaStream_t stream);

}  // namespace zero::cuda
