// JSON that a stranger wrote.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero {

/// Arrays and objects within each other; no file of ours needs more than four.
inline constexpr int kMaxJsonDepth = 32;

/// Parses JSON. Error, whose message says what the text does ("names 'x' twice") and is without a
/// full stop, for text that is not JSON, an object that names a key twice (nlohmann keeps the
/// last), and values that nest deeper than kMaxJsonDepth (nlohmann prints and copies them by
/// recursion).
nlohmann::json parse_json(std::string_view text, bool comments = false);

/// The beginning of `text`, for a message: at most 120 bytes and whole characters.
std::string excerpt(std::string_view text);

}  // namespace zero
