// Weights that bitsandbytes has quantised, as transformers' save_pretrained writes them.
//
// Note [Files of bitsandbytes]
// Its 4 bits (Linear4bit): the tensor W has two codes a byte, the first in the upper half, in bytes
// or in another dtype of which they are the bytes. Beside it stand
//   W.absmax                         the scales of blocks, in fp32; or their codes, in bytes
//   W.quant_map                      the 16 numbers of NF4
//   W.nested_absmax                  where the scales have codes: the second scales, in fp32
//   W.nested_quant_map               and what the 256 codes mean
//   W.quant_state.bitsandbytes__nf4  JSON as bytes: quant_type, blocksize, dtype, shape, and
//                                    nested_blocksize and nested_offset
// A scale is nested_quant_map[code] * second scale + nested_offset, and an element
// quant_map[code] * scale, each rounded to fp32; the element is then rounded to `dtype`.
//
// Its 8 bits (LLM.int8, Linear8bitLt): beside a matrix X.weight of int8 stand X.SCB, the greatest
// magnitudes of its rows, and X.weight_format, which is 0 for rows in order. An element is
// (code * SCB) * (1 / 127), each rounded to fp32; it is then rounded to the dtype of the model's
// other weights.
#pragma once

#include "zero/checkpoint/weight_place.h"

namespace zero {

/// Replaces the tensors of matrices that bitsandbytes has quantised by the matrices, which are read
/// back range by range. Throws CheckpointError, which names the file, the tensor and the fault, for
/// another kind of quantisation (FP4), for tensors that are missing or have another size or dtype,
/// and for a state that is not as the note says.
void read_back_bitsandbytes(WeightPlaces& places);

}  // namespace zero
