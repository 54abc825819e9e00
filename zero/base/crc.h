// CRC-32C, which TensorBoard's event files carry. Its table of 256 entries is fast enough for
// records that are written once a step, but too slow for large data.
#pragma once

#include <cstdint>
#include <string_view>

namespace zero {

/// Returns the CRC-32C (Castagnoli's polynomial: RFC 3720, 12.1) of `bytes`.
uint32_t crc32c(std::string_view bytes);

}  // namespace zero
