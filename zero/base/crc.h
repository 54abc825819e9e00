// CRCs, as formats that carry them want them. A table of 256 entries: for what is written once a
// step, not for data.
#pragma once

#include <cstdint>
#include <string_view>

namespace zero {

/// CRC-32C (Castagnoli's polynomial: RFC 3720, 12.1) of `bytes`.
uint32_t crc32c(std::string_view bytes);

/// CRC-32 (that of zlib, gzip and PNG: RFC 1952, 8) of `bytes`.
uint32_t crc32(std::string_view bytes);

}  // namespace zero
