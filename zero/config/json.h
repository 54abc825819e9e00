// JSON text that people write: read with limits, shown in errors. Private: it includes
// nlohmann-json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero::fields {

using Json = nlohmann::ordered_json;

/// Reads JSON text as people write it: with comments (`//`, `/* */`, and `#` as HJSON has them) and
/// a comma behind the last value. `origin` names it in errors. Throws ConfigError if it is not
/// valid, if a key stands twice in one object, if it is nested too deep for any configuration, or
/// if it is a file of another kind (json_kind.h).
Json parse_json(std::string_view text, std::string_view origin);

/// Returns the text of a file. Throws ConfigError if it cannot be read.
std::string read_text(const std::string& path);

/// Returns `value` in the form for an error: not longer than a line.
std::string show(const Json& value);

}  // namespace zero::fields
