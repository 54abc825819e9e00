// The formats in which frozen weights beneath adapters are kept: their names, bytes and values.
//
// Note [INT8 by blocks]
// A matrix is cut into blocks of 128 elements, in the order of its storage. Its bytes are one
// message of Note [Quantised messages] in comm/quantise_kernels.h: the scales of all blocks, in
// fp32, and behind them the codes, a whole number of -127 to 127 for each element. A scale is the
// block's greatest magnitude / 127, rounded to 17 significant bits, and a code is the nearest
// multiple of it (a tie goes to the even one). Read back, an element is code * scale, which is
// exact in fp32, rounded once to the dtype that is asked for. So every bit is defined, whatever
// computes it.
//
// n elements take n + 4 ceil(n / 128) bytes, 8.25 bits each. If an element is infinite or NaN, its
// block is NaN when it is read.
//
// Note [NF4] in nf4.h has the other format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace zero {

/// The format of frozen weights beneath adapters.
enum class BaseFormat : uint8_t { as_they_are, nf4, int8 };

/// The names of the formats, which settings, options and Python use.
inline constexpr std::pair<std::string_view, BaseFormat> kBaseFormats[] = {
    {"none", BaseFormat::as_they_are}, {"nf4", BaseFormat::nf4}, {"int8", BaseFormat::int8}};

/// Returns the name of a format.
std::string_view name_of(BaseFormat format);
/// Returns the format that packs weights and has this name. Throws ConfigError for another name,
/// and for "none".
BaseFormat packed_format(std::string_view name);

/// The format of a matrix that is kept in bytes, and its sizes.
struct PackedMatrix {
  BaseFormat format = BaseFormat::nf4;
  std::vector<int64_t> sizes{};
  bool operator==(const PackedMatrix&) const = default;
};

namespace optim {

inline constexpr int64_t kInt8Block = 128;

// The functions below take each format but BaseFormat::as_they_are.

/// Returns the bytes of a matrix of `numel` elements.
int64_t packed_bytes(BaseFormat format, int64_t numel);
/// Quantises a matrix of `numel` elements. Uses LibTorch's intra-op threads.
void pack(BaseFormat format, const float* values, int64_t numel, std::byte* packed);
/// Writes the values of a matrix of `numel` elements in `dtype`: Float, BFloat16 or Half, rounded
/// to nearest. Uses LibTorch's intra-op threads.
void unpack(BaseFormat format, const std::byte* packed, int64_t numel, void* values,
            c10::ScalarType dtype);
/// Does the same in plain loops. Tests compare both in bits.
void unpack_reference(BaseFormat format, const std::byte* packed, int64_t numel, void* values,
                      c10::ScalarType dtype);

}  // namespace optim
}  // namespace zero
