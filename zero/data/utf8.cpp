#include "zero/data/utf8.h"

#include <fmt/format.h>
#include <utf8cpp/utf8.h>

#include <algorithm>

namespace zero {

size_t valid_utf8(std::string_view text) { return std::min(utf8::find_invalid(text), text.size()); }

std::string printable(std::string_view text, std::string_view kept) {
  std::string out;
  for (size_t good = valid_utf8(text); !text.empty();) {
    if (good == 0) {  // a byte that begins no character
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
      text.remove_prefix(1);
      good = valid_utf8(text);
      continue;
    }
    const auto* next = text.data();
    const uint32_t code = utf8::unchecked::next(next);
    const auto character = text.substr(0, static_cast<size_t>(next - text.data()));
    const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    if (!control || kept.find(character) != std::string_view::npos) {
      out += character;
    } else if (code == '\n' || code == '\t') {
      out += code == '\n' ? "\\n" : "\\t";
    } else {
      for (const char byte : character)
        out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    text.remove_prefix(character.size());
    good -= character.size();
  }
  return out;
}

std::string in_quotes(std::string_view text) { return fmt::format("\"{}\"", printable(text)); }

}  // namespace zero
