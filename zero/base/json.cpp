#include "zero/base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "zero/base/error.h"

namespace zero {

using nlohmann::json;

namespace {

/// Names the byte `at` of a text.
std::string place_of(std::string_view text, size_t at) {
  const auto before = text.substr(0, at);
  const auto begin = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  constexpr size_t kShown = 20;
  auto shown = text.substr(at, kShown);
  shown = shown.substr(0, std::min(shown.find('\n', 1), shown.size()));
  const auto quoted = json(std::string(shown)).dump(-1, ' ', true, json::error_handler_t::replace);
  return fmt::format("line {}, column {}, at {}",
                     std::count(before.begin(), before.end(), '\n') + 1, at - begin + 1, quoted);
}

}  // namespace

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
  // nlohmann takes a NUL for the end of the text.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw Error(fmt::format("is not JSON ({})", place_of(text, nul)));
  try {
    return json::parse(text, watch, true, comments);
  } catch (const json::exception& error) {
    throw Error(fmt::format("is not JSON ({})", json_fault(text, error)));
  }
}

std::string json_fault(std::string_view text, const json::exception& error) {
  const auto* parse = dynamic_cast<const json::parse_error*>(&error);
  if (parse == nullptr) return "a number in it is too large";
  const size_t at = parse->byte > 0 ? parse->byte - 1 : 0;
  if (at >= text.size()) return text.empty() ? "it is empty" : "it ends too early";
  return place_of(text, at);
}

std::string excerpt(std::string_view text) {
  constexpr size_t kMost = 120;
  if (text.size() <= kMost) return std::string(text);
  size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

}  // namespace zero
