// Arrays of bf16 and fp32 in fewer bytes, without the loss of a bit: the messages between hosts
// with `zero_packed_exponents`.
//
// Note [Packed exponents]
// In a trained model's numbers the sign and the mantissa look random, but the exponents of
// neighbours are alike: those of weights and gradients have an entropy of 2.5 to 4 bits of their 8.
// So in blocks of 128 elements an exponent is written as 4 bits, counted down from the largest of
// the block:
//   0        the exponent is 0 (zeros, and subnormal numbers)
//   1 to 14  the block's base, and up to 13 more
//   15       another one: it is written in full, behind all blocks
// and sign and mantissa as they are, 8 bits of bf16 and 24 of fp32. A message of n elements is
//   bases      a byte a block: its largest exponent less 13, at least 1
//   codes      half a byte an element; elements j and j + ceil(length / 2) of a block share one
//   mantissas  of bf16 a byte an element, the sign the highest bit; of fp32 such a byte for each,
//              and behind them the lower 16 bits of each
//   others     exponents in full, in the order of their elements; room for n / 64
// That is 12.2 of 16 bits, and 28.2 of 32, always as many: both ends know the length before. If an
// array has more other exponents than there is room for, the first byte is 255, which no base is.
// The elements follow unpacked, as far as there is room; the rest (`rest_bytes`) goes in a message
// of its own. Infinities, NaNs with their bits, and -0 arrive as they were.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace zero::comm {

/// The number of elements that share a base. If the parts of an array begin at multiples of it,
/// their messages together have the bytes of the message of the whole.
inline constexpr int64_t kExponentBlock = 128;

/// Returns true for BFloat16 and Float.
bool can_pack_exponents(c10::ScalarType dtype);

/// Returns the bytes of the message of `numel` elements.
int64_t packed_bytes(c10::ScalarType dtype, int64_t numel);

/// Returns the bytes of the elements that do not fit into a message that is not packed.
int64_t rest_bytes(c10::ScalarType dtype, int64_t numel);

/// message = values. Returns false if there was no room: then the last `rest_bytes` bytes of the
/// values must be sent too. Pointers to values need the alignment of their elements, messages need
/// none; they may not overlap. Serial; vectorised with run-time dispatch. Every instruction set
/// gives the same bytes, except in unused room, and so do the plain loops (`plainly`), with which
/// tests compare.
bool pack_exponents(std::byte* message, const void* values, c10::ScalarType dtype, int64_t numel,
                    bool plainly = false);

/// Returns true if `pack_exponents` has found room.
bool is_packed(const std::byte* message, int64_t numel);

/// values = message; without their last `rest_bytes` bytes if the message is not packed.
void unpack_exponents(void* values, c10::ScalarType dtype, const std::byte* message, int64_t numel,
                      bool plainly = false);

}  // namespace zero::comm
