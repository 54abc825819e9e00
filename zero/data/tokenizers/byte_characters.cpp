#include "zero/data/tokenizers/byte_characters.h"

#include <array>

#include "zero/data/tokenizers/characters.h"

namespace zero::tokenizers {
namespace {

struct ByteTable {
  std::array<std::string, 256> characters;
  std::array<int16_t, 256 + 68> bytes;  // by character; -1 for none
};

const ByteTable& byte_table() {
  static const ByteTable table = [] {
    ByteTable made;
    made.bytes.fill(-1);
    int32_t others = 256;
    for (int16_t byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 33 && byte <= 126) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const int32_t character = printable ? byte : others++;
      append(made.characters[static_cast<size_t>(byte)], character);
      made.bytes[static_cast<size_t>(character)] = byte;
    }
    return made;
  }();
  return table;
}

}  // namespace

std::string bytes_to_characters(std::string_view bytes) {
  const auto& table = byte_table().characters;
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 4);
  for (const char byte : bytes) out += table[static_cast<unsigned char>(byte)];
  return out;
}

std::optional<std::string> characters_to_bytes(std::string_view characters) {
  const auto& table = byte_table().bytes;
  std::string out;
  for (size_t at = 0; at < characters.size();) {
    const auto character = static_cast<size_t>(next_character(characters, at));
    if (character >= table.size() || table[character] < 0) return {};
    out += static_cast<char>(table[character]);
  }
  return out;
}

}  // namespace zero::tokenizers
