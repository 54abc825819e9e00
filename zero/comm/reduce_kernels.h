// Sums of N arrays, element by element in array order.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>
#include <span>

namespace zero::comm {

/// Returns true if `sum` takes these dtypes: Float, BFloat16 and Half (into themselves or Float),
/// Float into BFloat16 and Half (partial sums that are rounded here), Double, Int, Long, Byte.
bool can_sum(c10::ScalarType input, c10::ScalarType output);

/// Returns the dtype of a sum of `dtype` before it is rounded: Float for BFloat16 and Half, else
/// `dtype`.
c10::ScalarType partial_dtype(c10::ScalarType dtype);

/// The arrays to which the sum is written, each the whole sum.
using Outputs = std::span<void* const>;

/// A `block` that makes all inputs one block.
inline constexpr int64_t kOneBlock = std::numeric_limits<int64_t>::max();

/// output[i] = inputs[0][i] + inputs[1][i] + ... for i in [0, numel) and each output, added in that
/// order: in fp32 for Float, BFloat16 and Half, rounded once at the end (to nearest, ties to even)
/// if the output is not Float; in fp64 for Double; modulo 2^bits for integers. An output may be one
/// of the inputs (of the same dtype), else it may overlap none. Pointers need the alignment of
/// their elements only. An element's sum depends on that element's inputs alone. With `stream` the
/// inputs are asked for ahead, and outputs that are aligned alike are written past the caches, for
/// parts of large arrays. Serial; vectorised with run-time dispatch.
///
/// The inputs are those of hosts with `block` ranks each (from 1 on; the last may have fewer). A
/// block's inputs are added in order, then the blocks' unrounded sums in order. Hosts add in this
/// order, each its own ranks first.
void sum(Outputs outputs, c10::ScalarType output_dtype, std::span<const void* const> inputs,
         c10::ScalarType input_dtype, int64_t numel, bool stream, int64_t block = kOneBlock);

/// A plain loop to one output; `sum` is tested against it. (It may make another NaN of a NaN.)
void sum_reference(void* output, c10::ScalarType output_dtype, std::span<const void* const> inputs,
                   c10::ScalarType input_dtype, int64_t numel, int64_t block = kOneBlock);

}  // namespace zero::comm
