// Reads JSON that may be wrong.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero {

/// Arrays and objects may nest so deep; no file of ours needs more than four levels.
inline constexpr int kMaxJsonDepth = 32;

/// Parses JSON. Throws an Error for text that is not JSON, an object that names a key twice
/// (nlohmann keeps the last), and values that nest deeper than kMaxJsonDepth (nlohmann prints and
/// copies them by recursion). Its message says what is wrong with the text ("names 'x' twice"),
/// without a full stop.
nlohmann::json parse_json(std::string_view text, bool comments = false);

/// Returns the beginning of `text`, for a message: at most 120 bytes and whole characters.
std::string excerpt(std::string_view text);

}  // namespace zero
