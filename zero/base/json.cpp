#include "zero/base/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "zero/base/error.h"

namespace zero {

using nlohmann::json;

json parse_json(std::string_view text, bool comments) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth >= kMaxJsonDepth)
      throw Error(fmt::format("nests values more than {} deep", kMaxJsonDepth));
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      throw Error(fmt::format("names '{}' twice", excerpt(value.get<std::string>())));
    return true;
  };
  try {
    return json::parse(text, watch, true, comments);
  } catch (const json::exception& error) {
    throw Error(fmt::format("is not JSON ({})", excerpt(error.what())));
  }
}

std::string excerpt(std::string_view text) {
  constexpr size_t kMost = 120;
  if (text.size() <= kMost) return std::string(text);
  size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace zero
