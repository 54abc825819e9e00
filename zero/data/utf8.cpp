#include "zero/data/utf8.h"

#include <fmt/format.h>

namespace zero {

size_t valid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xC2 && lead < 0xE0 ? 2
                          : lead >= 0xE0 && lead < 0xF0 ? 3
                          : lead >= 0xF0 && lead < 0xF5 ? 4
                                                        : 0;
    if (length == 0 || at + length > text.size()) return at;
    const auto second = static_cast<unsigned char>(length > 1 ? text[at + 1] : 0);
    // Longer than need be, a surrogate, beyond the last character.
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
        (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F))
      return at;
    for (size_t i = 1; i < length; ++i) {
      if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return at;
    }
    at += length;
  }
  return at;
}

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t good = valid_utf8(text);
    for (const char byte : text.substr(0, good)) {
      if (byte == '\n') {
        out += "\\n";
      } else if (byte == '\t') {
        out += "\\t";
      } else if ((byte >= 0 && byte < 32) || byte == 127) {
        out += fmt::format("\\x{:02X}", byte);
      } else {
        out += byte;
      }
    }
    text.remove_prefix(good);
    if (text.empty()) break;
    out += fmt::format("\\x{:02X}", static_cast<unsigned char>(text.front()));
    text.remove_prefix(1);
  }
  return out + "\"";
}

}  // namespace zero
