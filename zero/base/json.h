// Reads JSON that strangers may have written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero {

/// The limit on nested arrays and objects. No file of libzero's needs more than four.
inline constexpr int kMaxJsonDepth = 32;

/// Parses JSON. Throws Error for text that is not JSON, for an object that names a key twice
/// (nlohmann keeps the last), for a NUL (nlohmann drops what follows it), and for values that nest
/// deeper than kMaxJsonDepth (nlohmann prints and copies them by recursion). The message says what
/// the text does ("names 'x' twice") and is without a full stop.
nlohmann::json parse_json(std::string_view text, bool comments = false);

/// Says in words where and why `text` is not JSON: "line 2, column 23, at 'x}'".
std::string json_fault(std::string_view text, const nlohmann::json::exception& error);

/// Returns the beginning of `text` for a message: at most 120 bytes and whole characters.
std::string excerpt(std::string_view text);

}  // namespace zero
