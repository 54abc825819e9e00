// CRCs for formats that need them. They use a table of 256 entries, which is enough for a few bytes
// a step, but slow for data.
#pragma once

#include <cstdint>
#include <string_view>

namespace zero {

/// Returns the CRC-32C (Castagnoli's polynomial: RFC 3720, 12.1) of `bytes`.
uint32_t crc32c(std::string_view bytes);

/// Returns the CRC-32 (that of zlib, gzip and PNG: RFC 1952, 8) of `bytes`.
uint32_t crc32(std::string_view bytes);

}  // namespace zero
