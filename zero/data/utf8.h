// UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zero {

/// The offset of the first byte that is not part of a UTF-8 character, or the size.
size_t valid_utf8(std::string_view text);

/// `text` in quotes for a message: control characters and bytes of no character as \n or \xNN.
std::string in_quotes(std::string_view text);

}  // namespace zero
