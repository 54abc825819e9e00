// The characters by which byte-level tokenizers write bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zero::tokenizers {

/// Returns the character of each byte, joined: printable bytes of Latin-1 are themselves, the other
/// 68 are U+0100 and on.
std::string bytes_to_characters(std::string_view bytes);
/// Does the reverse, and returns nothing if a character is none of those.
std::optional<std::string> characters_to_bytes(std::string_view characters);

}  // namespace zero::tokenizers
