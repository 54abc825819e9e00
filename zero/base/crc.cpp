#include "zero/base/crc.h"

#include <array>

namespace zero {
namespace {

using Table = std::array<uint32_t, 256>;

/// Returns the remainders of all bytes, for a polynomial with its bits reversed.
constexpr Table table_of(uint32_t polynomial) {
  Table table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit)
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? polynomial : 0);
    table[byte] = remainder;
  }
  return table;
}

constexpr Table kCastagnoli = table_of(0x82f63b78);

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t remainder = ~uint32_t{0};
  for (const char byte : bytes) {
    remainder =
        (remainder >> 8) ^ kCastagnoli[(remainder ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~remainder;
}

}  // namespace zero
