#include "zero/config/json.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero::fields {

namespace {

/// What reads a value goes down its levels by recursion, so that their number is limited.
constexpr int kMostLevels = 64;
constexpr size_t kLongestShown = 160;

}  // namespace

Json parse_json(std::string_view text, std::string_view origin) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int level, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && level >= kMostLevels) {
      throw ConfigError(fmt::format("{} is nested deeper than {} levels; no configuration is.",
                                    origin, kMostLevels));
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      throw ConfigError(
          fmt::format("{}: the key {} stands twice in one object.", origin, show(value)));
    }
    return true;
  };
  try {
    return Json::parse(text, check, true, true);
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("{} is not valid JSON: {}", origin, error.what()));
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
  auto text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongestShown) {
    text.resize(kLongestShown);
    text += "...";
  }
  return text;
}

}  // namespace zero::fields
