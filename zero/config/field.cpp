#include "zero/config/field.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "zero/base/error.h"

namespace zero::fields {

namespace {

/// Keys longer than any of ours are not compared with ours.
constexpr size_t kLongestKey = 100;

std::string either(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

/// 5e8 is a whole number to whoever writes it.
std::optional<int64_t> whole(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number()) return std::nullopt;
  const double real = value.get<double>();
  constexpr double kTwoTo63 = 9223372036854775808.0;
  if (!(std::floor(real) == real) || real < -kTwoTo63 || real >= kTwoTo63) return std::nullopt;
  return static_cast<int64_t>(real);
}

std::string range_of(const About& about, bool integer) {
  constexpr double kAnything = -9.2e18;
  if (about.least && about.most) {
    if (integer && *about.most - *about.least <= 3) {
      std::vector<std::string> all;
      for (double n = *about.least; n <= *about.most; ++n) all.push_back(fmt::format("{}", n));
      return either(all);
    }
    return fmt::format("from {} to {}", *about.least, *about.most);
  }
  std::string text;
  if (about.least && *about.least > kAnything) text = fmt::format("at least {}", *about.least);
  if (about.most) text = fmt::format("at most {}", *about.most);
  if (about.below) text += fmt::format("{}less than {}", text.empty() ? "" : " and ", *about.below);
  return text;
}

bool in_range(const About& about, double number) {
  return (!about.least || number >= *about.least) && (!about.most || number <= *about.most) &&
         (!about.below || number < *about.below);
}

/// `value` as it is kept, or nothing where the field does not take it.
std::optional<Json> fitting(const Spec& spec, const Json& value) {
  Json normal = value;
  bool fits = false;
  switch (spec.kind) {
    case Kind::boolean:
      fits = value.is_boolean();
      break;
    case Kind::bytes:
      if (value.is_string()) {
        const auto bytes = parse_bytes(value.get_ref<const std::string&>());
        if (!bytes) break;
        normal = *bytes;
      }
      [[fallthrough]];
    case Kind::integer:
      if (const auto number = whole(normal)) {
        normal = *number;
        fits = in_range(spec.about, static_cast<double>(*number)) &&
               *number % spec.about.multiple_of == 0;
      }
      break;
    case Kind::number:
      fits = value.is_number() && std::isfinite(value.get<double>()) &&
             in_range(spec.about, value.get<double>());
      break;
    case Kind::pair:
      fits = value.is_array() && value.size() == 2 && value[0].is_number() && value[1].is_number();
      break;
    case Kind::text:
      fits = value.is_string() &&
             !(spec.about.not_empty && value.get_ref<const std::string&>().empty());
      break;
    case Kind::choice:
      fits =
          value.is_string() && std::find(spec.choices.begin(), spec.choices.end(),
                                         value.get_ref<const std::string&>()) != spec.choices.end();
      break;
    case Kind::section:
      fits = value.is_object();
      break;
  }
  if (!fits) return std::nullopt;
  return normal;
}

[[noreturn]] void refuse(const Spec& spec, const Json& value, std::string_view name, bool of_file) {
  std::string hint;
  if (spec.kind == Kind::choice && value.is_string()) {
    const auto& word = value.get_ref<const std::string&>();
    if (word.size() <= kLongestKey) hint = did_you_mean(word, spec.choices);
  }
  // Of numbers that 64 bits do not hold.
  const bool integer = spec.kind == Kind::integer || spec.kind == Kind::bytes;
  if (integer && value.is_number() && value.get<double>() >= 9.2e18)
    hint = fmt::format(" The greatest whole number is {}.", std::numeric_limits<int64_t>::max());
  throw ConfigError(
      fmt::format("{} is {}; it must be {}.{}", name, show(value), spec.wanted(of_file), hint));
}

std::vector<std::string> names_of(const Spec& spec) {
  std::vector<std::string> names{spec.key};
  const auto dot = spec.key.rfind('.');
  const auto section = dot == std::string::npos ? "" : spec.key.substr(0, dot + 1);
  for (const auto other : spec.about.also) names.push_back(section + std::string(other));
  return names;
}

bool is_default(const Json& value) {
  return value.is_null() || (value.is_string() && value.get_ref<const std::string&>() == "auto");
}

/// The value at `key`, or null.
const Json* look_up(const Json& file, std::string_view key) {
  const Json* at = &file;
  while (true) {
    if (!at->is_object()) return nullptr;
    const auto dot = key.find('.');
    const auto found = at->find(std::string(key.substr(0, dot)));
    if (found == at->end()) return nullptr;
    at = &*found;
    if (dot == std::string_view::npos) return at;
    key.remove_prefix(dot + 1);
  }
}

}  // namespace

std::string Spec::wanted(bool of_file) const {
  if (!about.only.is_null()) return show(about.only);
  const auto with_range = [&](std::string text, bool integer) {
    const auto range = range_of(about, integer);
    if (integer && about.least && about.most && *about.most - *about.least <= 3) return range;
    if (!range.empty()) text += (range.starts_with("from") ? " " : ", ") + range;
    if (about.multiple_of > 1) text += fmt::format(", a multiple of {}", about.multiple_of);
    if (about.zero_is_none) text += of_file ? ", or 0" : ", or none";
    return text;
  };
  switch (kind) {
    case Kind::boolean:
      return "true or false";
    case Kind::integer:
      return with_range("a whole number", true);
    case Kind::bytes:
      return with_range("a number of bytes, as 6000000000 or \"6GB\"", true);
    case Kind::number:
      return with_range("a number", false);
    case Kind::pair:
      return "an array of two numbers";
    case Kind::text:
      return about.not_empty ? "a string that is not empty" : "a string";
    case Kind::choice: {
      std::vector<std::string> quoted;
      for (const auto& choice : choices) quoted.push_back('"' + choice + '"');
      return either(quoted);
    }
    case Kind::section:
      return "an object {...}";
  }
  return {};
}

void Spec::verify(const Json& value) const {
  if (!value.is_null() && !fitting(*this, value))
    refuse(*this, value, key.empty() ? about.option : std::string_view(key), false);
}

Json Spec::normalize(const Json& value, std::string_view name) const {
  if (value.is_null()) return value;
  if (!about.replaced_by.empty())
    throw ConfigError(fmt::format("{} is replaced by {}.", name, about.replaced_by));
  const bool zero = value.is_number() && value.get<double>() == 0;
  if (about.zero_is_none && zero) return {};
  auto normal = fitting(*this, value);
  if (!normal) refuse(*this, value, name, true);
  if (!about.only.is_null() && *normal != about.only) {
    throw ConfigError(fmt::format("{} is {}; it must be {}: {}.", name, show(value),
                                  show(about.only), about.because));
  }
  return *normal;
}

Json Spec::from_option(std::string_view text) const {
  const auto* end = text.data() + text.size();
  if (!about.words.empty()) {
    std::vector<std::string> known;
    for (const auto& [word, value] : about.words) {
      if (word == text) return value;
      known.emplace_back(word);
    }
    throw ConfigError(fmt::format("{} is \"{}\"; it must be {}.{}", about.option, text,
                                  either(known), did_you_mean(text, known)));
  }
  if (kind == Kind::integer || kind == Kind::number || kind == Kind::bytes) {
    int64_t integer = 0;
    const auto [rest, error] = std::from_chars(text.data(), end, integer);
    if (error == std::errc() && rest == end) return normalize(integer, about.option);
    double number = 0;
    const auto [rest_of_number, other_error] = std::from_chars(text.data(), end, number);
    if (other_error == std::errc() && rest_of_number == end) return normalize(number, about.option);
  }
  return normalize(std::string(text), about.option);
}

// --- Files ---

void Keys::add(const Spec& spec) {
  for (const auto& name : names_of(spec)) {
    if (name.empty()) continue;
    for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
      places_.push_back({name.substr(0, dot), true});
    places_.push_back({name, false});
  }
}

void Keys::check(const Json& file, const std::string& prefix) const {
  if (!file.is_object()) {
    const auto name =
        prefix.empty() ? "The configuration" : prefix.substr(0, prefix.size() - 1);  // its dot
    throw ConfigError(fmt::format("{} is {}; it must be an object {{...}}.", name, show(file)));
  }
  check(file, "", prefix);
}

void Keys::check(const Json& object, const std::string& path, const std::string& prefix) const {
  for (const auto& [key, value] : object.items()) {
    const auto name = path + key;
    if (path.empty() && std::find(foreign_.begin(), foreign_.end(), key) != foreign_.end())
      continue;
    // A dot in a key of the file is no way into a section.
    const auto place = key.find('.') != std::string::npos
                           ? places_.end()
                           : std::find_if(places_.begin(), places_.end(),
                                          [&](const Place& known) { return known.key == name; });
    if (place == places_.end()) {
      std::vector<std::string> known;
      for (const auto& other : places_) {
        if (!other.key.starts_with(path) || other.key.find('.', path.size()) != std::string::npos)
          continue;
        const auto last = other.key.substr(path.size());
        if (std::find(known.begin(), known.end(), last) == known.end()) known.push_back(last);
      }
      throw ConfigError(
          fmt::format("Unknown key {} in the configuration.{}",
                      "'" + (name.size() <= kLongestKey ? prefix + name : show(name)) + "'",
                      key.size() <= kLongestKey ? did_you_mean(key, known) : ""));
    }
    if (!place->section || is_default(value)) continue;
    if (!value.is_object()) {
      throw ConfigError(
          fmt::format("{} is {}; it must be an object {{...}}.", prefix + name, show(value)));
    }
    check(value, name + ".", prefix);
  }
}

const Json* find(const Json& file, const Spec& spec, const std::string& prefix) {
  const Json* value = nullptr;
  std::string_view of;
  const auto names = names_of(spec);
  for (const auto& name : names) {
    if (name.empty()) continue;
    const auto* found = look_up(file, name);
    if (found == nullptr) continue;
    if (value != nullptr) {
      throw ConfigError(fmt::format("{0}{1} and {0}{2} are two names of one key: leave one out.",
                                    prefix, of, name));
    }
    value = found;
    of = name;
  }
  if (value == nullptr || value->is_null()) return nullptr;
  return spec.kind != Kind::text && is_default(*value) ? nullptr : value;
}

void put(Json& file, std::string_view key, Json value) {
  Json* at = &file;
  for (auto dot = key.find('.'); dot != std::string_view::npos; dot = key.find('.')) {
    at = &(*at)[std::string(key.substr(0, dot))];
    if (!at->is_object()) *at = Json::object();
    key.remove_prefix(dot + 1);
  }
  (*at)[std::string(key)] = std::move(value);
}

}  // namespace zero::fields
