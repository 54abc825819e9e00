// The vector kernels behind optimizer.h: one thread's work on elements [begin, end). Each runs on
// the widest instruction set of this machine (Highway's run-time dispatch).
//
// Note [Same bits everywhere]
// Every kernel uses IEEE additions, multiplications, divisions and square roots alone, each rounded
// on its own, in one fixed order. There is no fused multiply-add: an instruction set without it
// would round differently. So an element's result is the same on every instruction set, at every
// position and in the plain reference; the tail of an array runs through the same code in a padded
// copy. The files are compiled with -ffp-contract=off, since compilers fuse even intrinsics. This
// costs no time: the passes wait for memory.
#pragma once

#include <cstdint>

#include "zero/optim/optimizer.h"

namespace zero::optim::kernels {

/// AdamW's hyper-parameters for one step, computed in fp64 and rounded once.
struct AdamWScalars {
  float gradient_scale;
  float decay;  ///< factor of the weights, 1 - lr * weight_decay; 1 when not decoupled
  float l2;     ///< weight_decay when not decoupled; else 0
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float inverse_root_correction2;  ///< 1 / sqrt(1 - beta2^step)
  float eps;
  float negative_step_size;  ///< -lr / (1 - beta1^step)
};

/// Sgd's hyper-parameters for one step.
struct SgdScalars {
  float gradient_scale;
  float l2;
  float momentum;
  float one_minus_dampening;
  float negative_lr;
  bool first;  ///< the momentum buffer becomes the gradient
  bool nesterov;
};

void adamw(const AdamWScalars& scalars, const Range& range, int64_t begin, int64_t end);
void sgd(const SgdScalars& scalars, const Range& range, int64_t begin, int64_t end);
void accumulate(float* destination, const void* source, c10::ScalarType source_dtype, int64_t begin,
                int64_t end);

/// Squares are summed in fp64 (the square of an fp32 value is exact there) over blocks of this many
/// elements. Within a block, element i is added to partial sum i % kNormLanes in order of i; then
/// the partial sums are added in order.
inline constexpr int64_t kNormBlock = 16384;
inline constexpr int64_t kNormLanes = 32;

/// The sum of squares of elements [begin, end), at most kNormBlock of them.
double squared_norm_block(const void* values, c10::ScalarType dtype, int64_t begin, int64_t end);

}  // namespace zero::optim::kernels
