// Arrays as few bits: the messages between hosts with quantised weights and gradients (ZeRO++,
// 2306.10209, sections 3.1 and 3.3).
//
// Note [Quantised messages]
// An array is quantised by blocks of `block` elements, the last of which may be shorter. A block
// has a scale and one code an element: element = code * scale.
//   int8  whole numbers of -127 to 127
//   int4  whole numbers of -7 to 7, two a byte
//   fp8   e4m3: 1 sign, 4 exponent and 3 mantissa bits, up to 448
// The scale is max / 127, max / 7 or max / 448, where max is the block's largest magnitude. That
// element gets the greatest code and none is cut off (a scale of max / 128 would cut the largest
// off by 1/128 of it, one of max / 8 by an eighth). The scale is an fp32 number rounded to 17
// significant bits, so that its product with any code is an exact fp32 number. So the values of a
// message do not depend on how they are computed, and quantising them again gives the same message.
//   - Codes are rounded to nearest, ties to even. In int8 and int4, -0 becomes 0.
//   - The least scale is 2^-117: values below half of that (of 2^-126 in fp8) become 0. So there
//     is no block without a scale, and zeros become zeros.
//   - If an element is infinite or NaN, the scale is NaN, and so is the whole block when it is
//     read: an overflow is not lost on its way.
// A message is the scales, in fp32, and behind them the codes, in one stretch of bytes without
// alignment. Of int4 a byte holds elements j (its lower half) and j + ceil(length / 2) of its
// block.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace zero::comm {

enum class WireFormat : uint8_t { int8, int4, fp8 };

struct Quantisation {
  WireFormat format = WireFormat::int8;
  int64_t block = 128;  ///< elements that share a scale: 64, 128, 192 or 256
  bool operator==(const Quantisation&) const = default;
};

inline constexpr int64_t kLargestBlock = 256;

/// Returns true for the dtypes that can be quantised: Float, BFloat16 and Half.
bool can_quantise(c10::ScalarType dtype);

/// Returns the number of blocks of an array of `numel` elements.
int64_t blocks_of(const Quantisation& quantisation, int64_t numel);

/// Returns the bytes of its message: 4 a block, and 1 (int8, fp8) or 1/2 (int4) an element.
int64_t wire_bytes(const Quantisation& quantisation, int64_t numel);

/// A part of a message, so that several threads can share one.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();  ///< a greater one means the last block's
};

// The functions below take the whole message of `numel` elements, and read and write only the
// blocks in `range`; `values`, `sum` and `message` point to the beginnings of the whole. Pointers
// need the alignment of their elements only, messages need none. No two may overlap. Serial;
// vectorised with run-time dispatch. Every instruction set gives the same bits as the plain loops,
// with which tests compare, except for the kind of NaN that a NaN becomes in bf16 and fp16.

enum class Loops : uint8_t { vectors, plain };

/// message = values, quantised.
void quantise(std::byte* message, const void* values, c10::ScalarType dtype, int64_t numel,
              const Quantisation& quantisation, BlockRange range = {},
              Loops loops = Loops::vectors);

/// values = the values of the message, rounded to `dtype` (to nearest, ties to even).
void dequantise(void* values, c10::ScalarType dtype, const std::byte* message, int64_t numel,
                const Quantisation& quantisation, BlockRange range = {},
                Loops loops = Loops::vectors);

/// sum += the values of the message, in fp32.
void dequantise_add(float* sum, const std::byte* message, int64_t numel,
                    const Quantisation& quantisation, BlockRange range = {},
                    Loops loops = Loops::vectors);

/// Returns the quantisation of the errors that `quantise_with_feedback` keeps from one message to
/// the next. They are a message too, of int8 and the same block: 1 byte an element and 4 a block.
Quantisation feedback_quantisation(const Quantisation& quantisation);

/// LoCo (2407.04480, section 3; DeepSpeed's zeropp_loco_param): message = values + e, quantised;
/// then e = beta e + (1 - beta) (values + e - the values of the message), all in fp32. `error`
/// holds e as a message of `feedback_quantisation`; zero bytes are an e of zeros, with which it
/// begins. If a block's message is NaN, its e stays as it was.
void quantise_with_feedback(std::byte* message, std::byte* error, const void* values,
                            c10::ScalarType dtype, int64_t numel, const Quantisation& quantisation,
                            float beta, BlockRange range = {}, Loops loops = Loops::vectors);

}  // namespace zero::comm
