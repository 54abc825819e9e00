#include "zero/config/field.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <ranges>

#include "zero/base/error.h"

namespace zero::fields {

namespace {

/// Keys longer than any of ours are not compared with ours, and are cut, with their sections, when
/// shown.
constexpr size_t kLongestKey = 100;
constexpr size_t kLongestPath = 300;

std::string either(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

/// Returns a whole number. People write it as 5e8, too.
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
      const auto most = static_cast<int64_t>(*about.most);
      for (auto n = static_cast<int64_t>(*about.least); n <= most; ++n)
        all.push_back(fmt::format("{}", n));
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

/// Returns `value` in the form in which it is stored, or nothing if the field does not take it.
std::optional<Json> fitting(const Spec& spec, const Json& value) {
  Json normal = with_present_word(spec, value);
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
    case Kind::numbers:
      fits = value.is_array() && std::ranges::all_of(value, [&](const Json& each) {
               return each.is_number() && std::isfinite(each.get<double>()) &&
                      in_range(spec.about, each.get<double>());
             });
      break;
    case Kind::pair:
      fits = value.is_array() && value.size() == 2 && value[1].is_number() &&
             (value[0].is_number() || (spec.about.null_first && value[0].is_null()));
      break;
    case Kind::text:
      fits = value.is_string() &&
             !(spec.about.not_empty && value.get_ref<const std::string&>().empty());
      break;
    case Kind::texts:
      if (value.is_string())
        normal = value.get_ref<const std::string&>().empty() ? Json::array() : Json::array({value});
      fits = normal.is_array() && std::ranges::all_of(normal, [](const Json& each) {
               return each.is_string() && !each.get_ref<const std::string&>().empty();
             });
      break;
    case Kind::choice:
      fits = normal.is_string() &&
             std::find(spec.choices.begin(), spec.choices.end(),
                       normal.get_ref<const std::string&>()) != spec.choices.end();
      break;
    case Kind::section:
      fits = value.is_object();
      break;
    case Kind::list:
      fits = value.is_array();
      break;
    case Kind::anything:
      fits = true;
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
  // A number of the file may exceed 64 bits.
  const bool integer = spec.kind == Kind::integer || spec.kind == Kind::bytes;
  if (integer && value.is_number() && value.get<double>() >= 9.2e18)
    hint = fmt::format(" The greatest whole number is {}.", std::numeric_limits<int64_t>::max());
  throw ConfigError(
      fmt::format("{} is {}; it must be {}.{}", name, show(value), spec.wanted(of_file), hint));
}

/// Returns whether a key is a note, for which JSON has no other place.
bool is_note(std::string_view key) {
  return key.starts_with("_") || key.starts_with("#") || key.starts_with("//");
}

/// Returns whether `pattern`, whose parts may be "*", matches `key`.
bool matches(std::string_view pattern, std::string_view key) {
  while (true) {
    const auto wanted = pattern.substr(0, pattern.find('.'));
    const auto part = key.substr(0, key.find('.'));
    if (wanted != "*" && wanted != part) return false;
    if (wanted.size() == pattern.size() || part.size() == key.size())
      return wanted.size() == pattern.size() && part.size() == key.size();
    pattern.remove_prefix(wanted.size() + 1);
    key.remove_prefix(part.size() + 1);
  }
}

/// Returns "a." for "a.b", and "" for "b".
std::string section_of(std::string_view key) {
  const auto dot = key.rfind('.');
  return dot == std::string_view::npos ? "" : std::string(key.substr(0, dot + 1));
}

/// Makes a section of "TYPE:KEY=VALUE,KEY=VALUE".
Json section_from_option(std::string_view text) {
  const auto colon = text.find(':');
  Json params = Json::object();
  for (auto rest = colon == std::string_view::npos ? "" : text.substr(colon + 1); !rest.empty();) {
    const auto part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const auto equals = part.find('=');
    const auto value = equals == std::string_view::npos ? "" : part.substr(equals + 1);
    if (value.empty()) {
      throw ConfigError(fmt::format("'{}' of '{}' should be KEY=VALUE.", part, text));
    }
    auto json = Json::parse(value, nullptr, false);
    params[std::string(part.substr(0, equals))] =
        json.is_primitive() && !json.is_discarded() ? json : Json(std::string(value));
  }
  return {{"type", std::string(text.substr(0, colon))}, {"params", std::move(params)}};
}

bool is_switch(const Spec& spec) {
  return !spec.about.off.empty() || spec.key.ends_with(".enabled");
}

/// Returns whether a switch's value switches its section off.
bool is_off(const Spec& spec, const Json& value) {
  const auto& off = spec.about.off;
  return off.empty() ? value == false : std::find(off.begin(), off.end(), value) != off.end();
}

}  // namespace

bool is_default(const Json& value) {
  return value.is_null() || (value.is_string() && value.get_ref<const std::string&>() == "auto");
}

Json with_present_word(const Spec& spec, const Json& value) {
  if (spec.about.spellings.empty() || !value.is_string()) return value;
  std::string word = value.get<std::string>();
  std::ranges::transform(word, word.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto& [other, present] : spec.about.spellings) {
    if (word == other) return std::string(present);
  }
  return std::find(spec.choices.begin(), spec.choices.end(), word) != spec.choices.end()
             ? Json(word)
             : value;
}

std::string Spec::wanted(bool of_file) const {
  if (!about.only.is_null()) return show(about.only);
  const auto with_range = [&](std::string text, bool integer) {
    auto range = range_of(about, integer);
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
      return with_range("a number of bytes, as 6442450944 or \"6GB\"", true);
    case Kind::number:
      return with_range("a number", false);
    case Kind::numbers:
      return with_range("an array of numbers", false);
    case Kind::pair:
      return about.null_first ? "an array of two numbers, the first of which may be null"
                              : "an array of two numbers";
    case Kind::text:
      return about.not_empty ? "a string that is not empty" : "a string";
    case Kind::texts:
      return "a string, or an array of strings that are not empty";
    case Kind::choice: {
      std::vector<std::string> quoted;
      for (const auto& choice : choices) quoted.push_back('"' + choice + '"');
      return either(quoted);
    }
    case Kind::section:
      return "an object {...}";
    case Kind::list:
      return "an array";
    case Kind::anything:
      return "anything";
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
  if (about.auto_is_none && is_default(value)) return {};
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
  if (!about.by_option.is_null()) return about.by_option;
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
  if (kind == Kind::section) return section_from_option(text);
  if (kind == Kind::numbers) {
    auto numbers = Json::array();
    for (const auto part : std::views::split(text, ',')) {
      std::string_view word(part.begin(), part.end());
      while (word.starts_with(' ')) word.remove_prefix(1);
      while (word.ends_with(' ')) word.remove_suffix(1);
      double number = 0;
      const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), number);
      const bool whole_word = error == std::errc() && rest == word.data() + word.size();
      numbers.push_back(whole_word && std::isfinite(number) ? Json(number)
                                                            : Json(std::string(word)));
    }
    if (numbers.empty()) numbers.push_back("");  // which is refused: no number was given
    return normalize(numbers, about.option);
  }
  return normalize(std::string(text), about.option);
}

// --- Reports ---

void Report::refuse(std::string key, std::string text) {
  if (!collects_) throw ConfigError(text);
  add({std::move(key), Effect::refused, std::move(text)});
}

void Report::unknown(std::string key, std::string text, bool harmless) {
  if (lenient_ || harmless) {
    add({std::move(key), Effect::none, std::move(text)});
  } else {
    refuse(std::move(key), std::move(text));
  }
}

void Report::pass_over(const std::string& section, Effect effect, std::string text) {
  std::erase_if(findings_, [&](const Finding& finding) {
    return finding.effect != Effect::refused &&
           (finding.key == section || finding.key.starts_with(section + "."));
  });
  add({section, effect, std::move(text)});
}

void Report::guard(const std::string& key, const std::function<void()>& body) {
  if (!collects_) return body();
  try {
    body();
  } catch (const ConfigError& error) {
    add({key, Effect::refused, error.what()});
  }
}

void Report::throw_refused() const {
  std::vector<Finding> refused;
  for (const auto& finding : findings_) {
    if (finding.effect == Effect::refused) refused.push_back(finding);
  }
  if (!refused.empty()) throw ConfigError(fmt::format("{}", fmt::join(lines_of(refused), "\n")));
}

namespace {

/// Writes keys as "a.b, c, d.e", by section, which is named once. A section that is switched on is
/// named itself.
std::string list_of(std::vector<std::string> keys) {
  for (auto& key : keys) {
    if (key.ends_with(".enabled")) key = key.substr(0, key.rfind('.'));
  }
  std::stable_sort(keys.begin(), keys.end(), [](const auto& one, const auto& other) {
    return section_of(one) < section_of(other);
  });
  std::string list;
  std::string before;
  for (const auto& key : keys) {
    const auto section = section_of(key);
    const bool same = !section.empty() && section == before;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", same ? key.substr(section.size()) : key);
    before = section;
  }
  return list;
}

}  // namespace

std::vector<std::string> lines_of(std::span<const Finding> findings) {
  std::vector<std::string> texts;
  for (const auto& finding : findings) {
    if (std::find(texts.begin(), texts.end(), finding.text) == texts.end())
      texts.push_back(finding.text);
  }
  std::vector<std::string> lines;
  for (const auto& text : texts) {
    std::vector<std::string> keys;
    for (const auto& finding : findings) {
      if (finding.text == text && !finding.key.empty()) keys.push_back(finding.key);
    }
    const bool told = keys.empty() || (keys.size() == 1 && text.find(keys[0]) != std::string::npos);
    const auto named = list_of(std::move(keys));
    lines.push_back(told ? text : text.empty() ? named : fmt::format("{}: {}", named, text));
  }
  return lines;
}

// --- Files ---

std::vector<std::string> names_of(const Spec& spec) {
  std::vector<std::string> names{spec.key};
  const auto section = section_of(spec.key);
  for (const auto other : spec.about.also) names.push_back(section + std::string(other));
  return names;
}

void Keys::add(const Spec& spec) {
  for (const auto& name : names_of(spec)) {
    if (name.empty()) continue;
    for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
      places_.push_back({name.substr(0, dot), true});
    places_.push_back({name, false});
  }
}

void Keys::check(const Json& file, const std::string& prefix, Report& report,
                 const std::function<bool(const std::string&)>& passes_over) const {
  if (!file.is_object()) {
    const auto name =
        prefix.empty() ? "The configuration" : prefix.substr(0, prefix.size() - 1);  // its dot
    report.refuse(prefix.empty() ? "" : name,
                  fmt::format("{} is {}; it must be an object {{...}}.", name, show(file)));
    return;
  }
  check(file, "", prefix, report, passes_over);
}

const Keys::Place* Keys::place(const std::string& name) const {
  const auto found = std::find_if(places_.begin(), places_.end(),
                                  [&](const Place& known) { return matches(known.key, name); });
  return found == places_.end() ? nullptr : &*found;
}

void Keys::check(const Json& object, const std::string& path, const std::string& prefix,
                 Report& report, const std::function<bool(const std::string&)>& passes_over) const {
  for (const auto& [key, value] : object.items()) {
    const auto name = path + key;
    if (is_note(key)) continue;
    if (path.empty() && std::find(foreign_.begin(), foreign_.end(), key) != foreign_.end())
      continue;
    // A dot in a key of the file does not lead into a section.
    const auto* known = key.find('.') != std::string::npos ? nullptr : place(name);
    if (known == nullptr) {
      const auto shown = name.size() <= kLongestPath ? prefix + name : show(name);
      const bool harmless = !path.empty() && passes_over(path.substr(0, path.size() - 1));
      report.unknown(shown,
                     fmt::format("Unknown key '{}' in the configuration.{}", shown,
                                 key.size() <= kLongestKey ? hint(key, path) : ""),
                     harmless);
      continue;
    }
    if (!known->section || is_default(value)) continue;
    if (!value.is_object()) {
      if (!path.empty() && passes_over(path.substr(0, path.size() - 1))) continue;
      report.refuse(prefix + name, fmt::format("{} is {}; it must be an object {{...}}.",
                                               prefix + name, show(value)));
      continue;
    }
    check(value, name + ".", prefix, report, passes_over);
  }
}

std::string Keys::hint(const std::string& key, const std::string& path) const {
  std::vector<std::string> here;
  std::string elsewhere;
  for (const auto& other : places_) {
    const auto section = section_of(other.key);
    const auto last = other.key.substr(section.size());
    if (section == path || (!path.empty() && !section.empty() && matches(section, path))) {
      if (std::find(here.begin(), here.end(), last) == here.end()) here.push_back(last);
    } else if (last == key && elsewhere.empty() && last != "enabled") {
      elsewhere = section;
    }
  }
  if (!elsewhere.empty())
    return fmt::format(" It belongs in the section '{}'.",
                       elsewhere.substr(0, elsewhere.size() - 1));
  auto near = did_you_mean(key, here);
  constexpr size_t kFew = 12;
  if (!near.empty() || path.empty() || here.empty() || here.size() > kFew) return near;
  return fmt::format(" The section has {}.", fmt::join(here, ", "));
}

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

Json with_present_names(Json file, const std::vector<const Spec*>& rows, const std::string& prefix,
                        Report& report) {
  const auto refuse_both = [&](std::string_view one, std::string_view other) {
    throw ConfigError(fmt::format("{0}{1} and {0}{2} are two names of one key: leave one out.",
                                  prefix, one, other));
  };
  const auto rename = [&](const Spec& row) {
    const auto names = names_of(row);
    const std::string* stands = nullptr;
    for (const auto& name : names) {
      if (name.empty() || look_up(file, name) == nullptr) continue;
      if (stands != nullptr) refuse_both(*stands, name);
      stands = &name;
    }
    if (stands == nullptr) return;
    Json value = *look_up(file, *stands);
    std::string key = row.key;
    if (!row.about.stands_for.empty()) {
      key = row.about.stands_for;
      value = is_default(value) ? Json() : row.normalize(value, prefix + row.key);
      for (const auto& [old, present] : row.about.meaning) {
        if (value == old) {
          value = present;
          break;
        }
      }
      const auto* other = look_up(file, key);
      if (other != nullptr && !is_default(*other) && !value.is_null()) refuse_both(*stands, key);
    }
    if (*stands == key) return;
    remove(file, *stands);
    if (!value.is_null() || row.about.stands_for.empty()) put(file, key, std::move(value));
  };
  for (const auto* row : rows) {
    bool renamed = false;
    report.guard(prefix + row->key, [&] {
      rename(*row);
      renamed = true;
    });
    if (renamed) continue;
    for (const auto& name : names_of(*row)) {
      if (!name.empty()) remove(file, name);
    }
  }
  return file;
}

const Json* find(const Json& file, const Spec& spec) {
  const auto* value = spec.key.empty() ? nullptr : look_up(file, spec.key);
  if (value == nullptr || value->is_null()) return nullptr;
  const bool decided = spec.kind == Kind::text || spec.about.auto_is_none;
  return !decided && is_default(*value) ? nullptr : value;
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

void remove(Json& file, std::string_view key) {
  const auto dot = key.find('.');
  const auto found = file.find(std::string(key.substr(0, dot)));
  if (found == file.end()) return;
  if (dot != std::string_view::npos) {
    remove(*found, key.substr(dot + 1));
    if (!found->empty()) return;
  }
  file.erase(found);
}

// --- What becomes of keys ---

namespace {

/// Calls f(i) for each row i that is a switch of a section around the key `name`.
void for_each_switch(const std::vector<const Spec*>& rows, std::string_view name,
                     const std::function<void(size_t)>& f) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!is_switch(*rows[i])) continue;
    auto section = section_of(rows[i]->key);
    for (int up = 1; up < rows[i]->about.off_levels; ++up)
      section = section_of(section.substr(0, section.size() - 1));
    if (!section.empty() && name.starts_with(section)) f(i);
  }
}

/// Visits the keys of a file for which there are rows.
class Effects {
 public:
  Effects(const Json& present, const std::vector<const Spec*>& rows, const std::vector<bool>& acts,
          const std::string& prefix, Report& report)
      : present_(present), rows_(rows), acts_(acts), prefix_(prefix), report_(report) {
    for (const auto& finding : report.findings()) {
      if (!finding.text.empty()) told_.push_back(finding.key);
    }
  }

  void walk(const Json& object, const std::string& path) {
    for (const auto& [key, value] : object.items()) {
      if (is_note(key) || key.find('.') != std::string::npos) continue;
      const auto name = path + key;
      const auto row = row_of(name);
      if (row < rows_.size()) {
        tell(name, *rows_[row], acts_[row], value);
      } else if (value.is_object()) {
        walk(value, name + ".");
      }
    }
  }

 private:
  size_t row_of(const std::string& name) const {
    for (size_t i = 0; i < rows_.size(); ++i) {
      for (const auto& other : names_of(*rows_[i])) {
        if (!other.empty() && matches(other, name)) return i;
      }
    }
    return rows_.size();
  }

  /// Returns whether the file has a switch of a section around the key that does not act. It is
  /// reported instead of the key.
  bool is_told_by_switch(const std::string& name) const {
    bool told = false;
    for_each_switch(rows_, name, [&](size_t i) {
      const auto* value = look_up(present_, rows_[i]->key);
      told = told || (value != nullptr && !is_default(*value) && !acts_[i]);
    });
    return told;
  }

  void tell(const std::string& name, const Spec& row, bool acts, const Json& value) {
    const auto key = prefix_ + name;
    if (std::find(told_.begin(), told_.end(), key) != told_.end()) return;
    const auto& about = row.about;
    const std::string warning =
        acts && about.warn && !is_default(value) ? about.warn(value) : std::string();
    const bool section = row.kind == Kind::section && value.is_object();
    if (acts && section && warning.empty()) return;  // its setter reports the keys in it
    const bool decided = row.kind == Kind::text || about.auto_is_none;
    const bool holds =
        value.is_null() || (is_default(value) && !(acts && decided)) ||
        std::find(about.holds.begin(), about.holds.end(), value) != about.holds.end() ||
        (!about.only.is_null() && value == about.only);
    const std::string why(about.details.empty() ? about.sentence : about.details);
    const bool on = about.acts_alone || !is_switched_off(present_, rows_, name, false);
    if (!acts && about.stands_for.empty() && is_told_by_switch(name) && !is_switch(row)) return;
    if (holds) {
      report_.add({key, Effect::holds, ""});
    } else if (!on) {
      report_.add({key, Effect::off, ""});
    } else if (acts || !about.stands_for.empty()) {
      report_.add({key, Effect::acts, warning});
    } else if (about.refused.empty()) {
      report_.add({key, Effect::none, why});
    } else {
      report_.add(
          {key, report_.lenient() ? Effect::none : Effect::refused, std::string(about.refused)});
    }
  }

  const Json& present_;
  const std::vector<const Spec*>& rows_;
  const std::vector<bool>& acts_;
  const std::string& prefix_;
  Report& report_;
  std::vector<std::string> told_;
};

}  // namespace

bool is_switched_off(const Json& file, const std::vector<const Spec*>& rows,
                     const std::string& name, bool said) {
  bool off = false;
  for_each_switch(rows, name, [&](size_t i) {
    const auto* value = look_up(file, rows[i]->key);
    const bool given = value != nullptr && !is_default(*value);
    const bool left_out = !said && !rows[i]->about.on_by_default;
    off = off || (given ? is_off(*rows[i], *value) : left_out);
  });
  return off;
}

void tell_effects(const Json& file, const Json& present, const std::vector<const Spec*>& rows,
                  const std::vector<bool>& acts, const std::string& prefix, Report& report) {
  Effects(present, rows, acts, prefix, report).walk(file, "");
}

}  // namespace zero::fields

namespace zero {

std::vector<std::string> warnings_of(std::span<const Finding> findings, std::string_view origin) {
  std::vector<std::string> warnings;
  std::vector<Finding> without_effect;
  const auto where = origin.empty() ? std::string() : fmt::format("{}: ", origin);
  for (const auto& finding : findings) {
    if (finding.effect == Effect::none) without_effect.push_back(finding);
    if (finding.effect == Effect::acts && !finding.text.empty())
      warnings.push_back(where + finding.text);
  }
  const auto lines = fields::lines_of(without_effect);
  if (!lines.empty()) {
    warnings.push_back(
        fmt::format("{}these keys have no effect here:\n  {}", where, fmt::join(lines, "\n  ")));
  }
  return warnings;
}

}  // namespace zero
