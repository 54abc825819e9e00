#include "zero/config/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/json_kind.h"

namespace zero::fields {

namespace {

/// Returns the end of the comment that begins at `at`, or `at` if none does.
size_t skip_comment(std::string_view text, size_t at) {
  const auto rest = text.substr(at);
  if (rest.starts_with('#') || rest.starts_with("//")) {
    const auto end = text.find('\n', at);
    return end == std::string_view::npos ? text.size() : end;
  }
  if (!rest.starts_with("/*")) return at;
  const auto end = text.find("*/", at + 2);
  return end == std::string_view::npos ? at : end + 2;  // a comment without an end is an error of
                                                        // JSON
}

size_t skip_string(std::string_view text, size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return std::min(at + 1, text.size());
}

/// Returns `text` with spaces in place of comments and of commas that nothing follows. Lines and
/// columns stay.
std::string plain_json(std::string_view text) {
  std::string plain(text);
  size_t comma = std::string::npos;  // behind a value, with nothing but space after it so far
  char last = '{';                   // the last character that is neither space nor comment
  for (size_t at = 0; at < text.size();) {
    if (const auto end = skip_comment(text, at); end != at) {
      for (; at < end; ++at) {
        if (plain[at] != '\n') plain[at] = ' ';
      }
      continue;
    }
    const char c = text[at];
    const bool closes = c == '}' || c == ']';
    if (closes && comma != std::string::npos) plain[comma] = ' ';
    const bool space = c == ' ' || c == '\t' || c == '\r' || c == '\n';
    if (!space) {
      const bool behind_value = c == ',' && last != '{' && last != '[' && last != ',';
      comma = behind_value ? at : std::string::npos;
      last = c;
    }
    at = c == '"' ? skip_string(text, at) : at + 1;
  }
  return plain;
}

}  // namespace

Json parse_json(std::string_view text, std::string_view origin) {
  Json json;
  try {
    json = zero::parse_json(plain_json(text));
  } catch (const Error& error) {
    throw ConfigError(fmt::format(
        "{} {}. A configuration is a JSON object, as {{\"train\": {{\"steps\": 100}}}}; "
        "comments and a comma behind the last value are allowed.",
        origin, error.what()));
  }
  const auto kind = kind_of(json);
  if (kind == JsonKind::unknown || kind == JsonKind::training) return json;
  throw ConfigError(fmt::format(
      "{} is {}. Give a configuration of training, as {{\"zero_optimization\": {{\"stage\": 2}}}}.",
      origin, what_it_is(kind)));
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  try {  // a folder opens, and reading it throws
    text.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {
    file.setstate(std::ios::failbit);
  }
  if (!file) {
    throw ConfigError(
        fmt::format("The configuration file '{}' cannot be read. Check that it is a file, its path "
                    "and its permissions.",
                    path));
  }
  return text;
}

std::string show(const Json& value) {
  // Numbers are shown as people write them: -1, where JSON has -1.0; and NaN, which JSON lacks.
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  return excerpt(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace zero::fields
