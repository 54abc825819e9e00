#include "zero/config/json.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero::fields {

Json parse_json(std::string_view text, std::string_view origin) {
  try {
    return zero::parse_json(text, true);
  } catch (const Error& error) {
    throw ConfigError(fmt::format("{} {}.", origin, error.what()));
  }
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    throw ConfigError(fmt::format(
        "The configuration file '{}' cannot be read. Check the path and its permissions.", path));
  }
  return text;
}

std::string show(const Json& value) {
  // As people write it: -1, where JSON has -1.0; and NaN, which JSON has not.
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  return excerpt(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace zero::fields
