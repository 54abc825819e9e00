// The formats in which the states of an optimizer are kept: fp32, bf16 (narrow.h), or 8 bits an
// element.
//
// Note [States in 8 bits]
// 8-bit optimizers (Dettmers and others, 2110.02861) have a scale for each block, so that a large
// element spoils only its neighbours, and codes that are finer near zero. Both are the same here,
// but the code is another one. A state is a moving mean or a sum: each step moves it by a hundredth
// or a thousandth, which is less than the distance between two of 256 codes. The paper's code
// rounds to nearest. There an element moves only because the greatest element of its block, the
// block's scale, is kept in fp32, and moves past the others. Here results are rounded
// stochastically, as in bf16 (Note [Stochastic rounding] in narrow.h): they are right on average
// whatever the neighbours do, even Adagrad's growing sum. If an unchanged element were rounded
// again, each step would add noise. So codes are small floating-point numbers with 4 bits of
// mantissa, and scales are powers of two: then a new scale moves codes by whole exponents, and a
// number that was representable stays so exactly, except at the lower end.
//
// 16 elements share an exponent of 8 bits, which is that of the greatest of them. An element of
// either sign has a sign and 3 bits of exponent. One that is never negative has 4 bits of exponent,
// since squares have twice the range. Below the least exponent codes are evenly spaced, down to
// zero. So codes reach down to a thousandth of the greatest element, and to 2^-18 of the greatest
// square. Smaller numbers are rounded to zero or to the least code, but squares above zero are
// never rounded to zero, since an update divides by their root.
//
// Four exponents and 64 codes are a block of 68 bytes. Parameters and slices begin on multiples of
// 64 elements (partition/layout.h), so no block is shared, and results do not depend on slices,
// tiers or threads. A group with an infinite or NaN number becomes NaN, so that it is noticed.
// fp32's denormals count as zeros, whatever the processor does with them. docs/precision.md says
// how near the results are to those of fp32 states.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero::optim {

enum class StateFormat : uint8_t { fp32, bf16, eight_bit };

/// The signs that the values of a state may have.
enum class Sign : uint8_t { either, positive };

/// The elements of a block of 8-bit states, its bytes, and the elements that share an exponent.
inline constexpr int64_t kCodedBlock = 64;
inline constexpr int64_t kCodedBytes = 68;
inline constexpr int64_t kCodedGroup = 16;

/// Returns the bytes of `numel` elements, which must be a multiple of kCodedBlock for 8-bit states.
constexpr int64_t state_bytes(StateFormat format, int64_t numel) {
  return format == StateFormat::eight_bit ? numel / kCodedBlock * kCodedBytes
                                          : numel * (format == StateFormat::bf16 ? 2 : 4);
}

/// Writes the fp32 values of the first `numel` elements of blocks to `values`. Uses LibTorch's
/// intra-op threads.
void decode(const std::byte* blocks, float* values, int64_t numel, Sign sign);
/// Rounds each value to the nearest code. Elements of the last block beyond `numel` keep their
/// codes, which must be zeros.
void encode(const float* values, std::byte* blocks, int64_t numel, Sign sign);

/// Do the same in plain loops, in double. Tests compare the kernels with them in bits.
void decode_reference(const std::byte* blocks, float* values, int64_t numel, Sign sign);
void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign);
/// Rounds stochastically, by the random bits of the elements from number `first` on of array
/// `array`, as round_stochastic in narrow.h does.
void encode_reference(const float* values, std::byte* blocks, int64_t numel, Sign sign,
                      uint64_t key, int array, int64_t first);

}  // namespace zero::optim
