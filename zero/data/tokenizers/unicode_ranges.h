// The classes of Unicode 16 that tokenizers' patterns use, since libraries have those of other
// versions.
#pragma once

#include <string_view>

namespace zero::tokenizers {

/// Returns what stands between the brackets of a regular expression for the general category L, N,
/// P, S or M; empty for another name.
std::string_view unicode_ranges(std::string_view property);

}  // namespace zero::tokenizers
