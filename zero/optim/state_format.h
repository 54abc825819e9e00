// In what the states of an optimizer are kept: fp32, bf16 (narrow.h), or 8 bits an element.
//
// Note [States in 8 bits]
// A scale for each block, so that a large element spoils none but its neighbours, and codes that
// are finer near zero, are those of 8-bit optimizers (Dettmers and others, 2110.02861). The code is
// another one. A state is a moving mean or a sum: each step moves it by a hundredth or a
// thousandth, which is less than the distance of two of 256 codes. The paper's code rounds to
// nearest; what then moves an element is that the block's greatest one, its scale, is kept in fp32
// and passes the others by. Here results are rounded stochastically, as in bf16 (Note [Stochastic
// rounding] in narrow.h): right on average whatever the neighbours do, Adagrad's growing sum
// included. Rounding again what did not change would add noise at each step. So codes are small
// floating-point numbers with 4 bits of mantissa, and scales powers of two: then a new scale moves
// codes by whole exponents, and what was representable remains so, exactly, but at the lower end.
//
// 16 elements share an exponent of 8 bits, the greatest's. An element of either sign has a sign and
// 3 bits of exponent; one that is never negative has 4, since squares have twice the range. Below
// the least exponent codes are evenly spaced, to zero. So codes reach down to a thousandth of the
// greatest, and of squares to 2^-18. What lies below is rounded to zero or to the least code, but
// squares above zero never to zero: an update divides by their root.
//
// Four exponents and 64 codes are a block of 68 bytes, and 64 elements are what parameters and
// slices begin on a multiple of (partition/layout.h). So no block is shared, and results do not
// depend on slices, tiers or threads. A group with a number that is infinite or NaN becomes NaN, so
// that it is noticed. fp32's denormals count as zeros, whatever the processor does with them.
// docs/precision.md has how near it comes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero::optim {

enum class StateFormat : uint8_t { fp32, bf16, eight_bit };

/// The signs that the values of a state may have.
enum class Sign : uint8_t { either, positive };

/// Elements of a block of 8-bit states, its bytes, and the elements that share an exponent.
inline constexpr int64_t kCodedBlock = 64;
inline constexpr int64_t kCodedBytes = 68;
inline constexpr int64_t kCodedGroup = 16;

/// Bytes of `numel` elements; of 8-bit states a multiple of kCodedBlock.
constexpr int64_t state_bytes(StateFormat format, int64_t numel) {
  return format == StateFormat::eight_bit ? numel / kCodedBlock * kCodedBytes
                                          : numel * (format == StateFormat::bf16 ? 2 : 4);
}

/// fp32 values of the first `numel` elements of blocks. On LibTorch's intra-op threads.
void decode(const std::byte* blocks, float* values, int64_t numel, Sign sign);
/// Rounds to the nearest code. Elements of the last block beyond `numel` keep theirs, which must be
/// zeros.
void encode(const float* values, std::byte* blocks, int64_t numel, Sign sign);

/// The same in plain loops, in double: what the kernels are tested against, in bits.
void decode_reference(const std::byte* blocks, float* values, int64_t numel, Sign sign);
void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign);
/// Rounds stochastically, by the random bits of elements from number `first` on of array `array`,
/// as round_stochastic in narrow.h.
void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign,
                      uint64_t key, int array, int64_t first);

}  // namespace zero::optim
