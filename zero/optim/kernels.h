// The vector kernels behind optimizer.h, except those of optimizers, which are in their own files.
// A kernel does the work of one thread on elements [begin, end). It runs on the widest instruction
// set of the machine (Highway's run-time dispatch).
//
// Note [Same bits everywhere]
// Every kernel uses only IEEE additions, multiplications, divisions and square roots, each rounded
// on its own, in one fixed order. There is no fused multiply-add: an instruction set without it
// would round differently. So an element's result is the same on every instruction set, at every
// position and in the plain reference. The tail of an array runs through the same code in a padded
// copy. The files are compiled with -ffp-contract=off, since compilers fuse even intrinsics. This
// costs no time, since the sweeps wait for memory.
#pragma once

#include <cstdint>

#include "zero/optim/optimizer.h"

namespace zero::optim::kernels {

void accumulate(float* destination, const void* source, c10::ScalarType source_dtype, int64_t begin,
                int64_t end);

/// Squares are summed in fp64 (the square of an fp32 value is exact there) over blocks of this many
/// elements. Within a block, element i is added to partial sum i % kNormLanes in order of i; then
/// the partial sums are added in order.
inline constexpr int64_t kNormBlock = 16384;
inline constexpr int64_t kNormLanes = 32;

/// Returns the sum of squares of elements [begin, end), of which there are at most kNormBlock.
double squared_norm_block(const void* values, c10::ScalarType dtype, int64_t begin, int64_t end);

}  // namespace zero::optim::kernels
