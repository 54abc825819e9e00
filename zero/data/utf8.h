// UTF-8, by the library utf8cpp.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zero {

/// Returns the offset of the first byte that is not part of a UTF-8 character, or the size.
size_t valid_utf8(std::string_view text);

/// Returns `text` as a terminal may be given it: control characters and bytes that are no UTF-8
/// become "\n", "\t" or "\xNN". Characters in `kept` stay.
std::string printable(std::string_view text, std::string_view kept = {});

/// Returns `text`, printable and in quotes, for a message.
std::string in_quotes(std::string_view text);

}  // namespace zero
