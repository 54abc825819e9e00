// Weights in 4 bits: NF4 with double quantisation, as QLoRA defines it (Dettmers and others,
// 2305.14314, section 3).
//
// Note [NF4]
// A matrix is cut into blocks of 64 elements, in the order of its storage. A block has a scale, its
// greatest magnitude, and each element is the nearest of 16 multiples of the scale (a tie goes to
// the lower one): kNf4Values, which appendix E of the paper lists, are the quantiles of a normal
// distribution, with zero and both ends exact. A block of zeros has the code of zero.
//
// Double quantisation: of the scales, which are all positive, an offset is taken away, and the rest
// is quantised in fp8 (e4m3) by blocks of 256 scales, with a second scale in fp32 for each: Note
// [Quantised messages] in comm/quantise_kernels.h. The paper says "8-bit floats" and leaves the
// kind open. Codes of elements are chosen by the exact scales. Read back, a scale is code * second
// scale + offset, where the product is exact in fp32, and an element is kNf4Values[code] * scale in
// fp32, rounded once more to the dtype that is asked for. So every bit is defined, whatever
// computes it.
//
// The offset is the mean of the scales, as in the paper (it is summed in double and rounded to
// fp32), or 0. fp8 is fine near the offset and as coarse as a sixteenth of the mean far from it:
// with the mean, blocks whose scales are much smaller would be lost; with 0 every scale is within a
// sixteenth of itself. The offset is the one with which the squares of the relative errors of all
// scales that are not 0 have the smaller sum (in double, in order), and the mean if both are equal.
//
// With B = ceil(n / 64) blocks and S = ceil(B / 256) second scales the bytes of n elements are
//   32 B  codes, two a byte, the first in the upper half; those beyond n are the code of zero
//   4     the offset
//   4 S   the second scales
//   B     the codes of the scales
// which is 4 + 8/64 + 32/(64 * 256) = 4.127 bits an element, and 4 bytes for each matrix. If an
// element is infinite or NaN, so is the offset, and no element is finite when the matrix is read:
// it does not go unnoticed.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace zero::optim {

inline constexpr int64_t kNf4Block = 64;
inline constexpr int64_t kNf4BlockBytes = kNf4Block / 2;
inline constexpr int64_t kNf4ScaleBlock = 256;
inline constexpr uint8_t kNf4Zero = 7;  ///< the code of zero
inline constexpr std::array<float, 16> kNf4Values{
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
};

/// Return the blocks of `numel` elements, the bytes of their codes, and all bytes.
constexpr int64_t nf4_blocks(int64_t numel) { return (numel + kNf4Block - 1) / kNf4Block; }
constexpr int64_t nf4_code_bytes(int64_t numel) { return nf4_blocks(numel) * kNf4BlockBytes; }
constexpr int64_t nf4_bytes(int64_t numel) {
  const int64_t blocks = nf4_blocks(numel);
  const int64_t second = (blocks + kNf4ScaleBlock - 1) / kNf4ScaleBlock;
  return nf4_code_bytes(numel) + 4 + 4 * second + blocks;
}

// The next three functions quantise a matrix that need not be in memory at once. They use
// LibTorch's intra-op threads.

/// Writes the codes of `count` elements, which begin with a block, in whole blocks.
void nf4_encode(const float* values, int64_t count, std::byte* codes);
/// Writes the scale of each of their blocks.
void nf4_scales(const float* values, int64_t count, float* scales);
/// Writes what stands behind the codes, from the scales of all `blocks` blocks of a matrix.
void nf4_encode_scales(const float* scales, int64_t blocks, std::byte* constants);

/// Quantises a matrix of `numel` elements.
void nf4_quantise(const float* values, int64_t numel, std::byte* packed);
/// Writes the values of a matrix of `numel` elements in `dtype`: Float, BFloat16 or Half, rounded
/// to nearest. Uses LibTorch's intra-op threads.
void nf4_dequantise(const std::byte* packed, int64_t numel, void* values, c10::ScalarType dtype);
/// Does the same in plain loops. Tests compare both in bits.
void nf4_dequantise_reference(const std::byte* packed, int64_t numel, void* values,
                              c10::ScalarType dtype);

}  // namespace zero::optim
