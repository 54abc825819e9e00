// What a row of a table of settings is made of: Note [Table of settings] in settings.h. Private: it
// includes nlohmann-json.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/config/json.h"

namespace zero::fields {

/// Whose a field is: Settings has a struct for each.
enum class Part { engine, model, program };

/// What values are; `bytes` also as "6GB", `pair` is an array of two numbers.
enum class Kind { boolean, integer, bytes, number, pair, text, choice, section };

/// What a row says of its field beside the key and the member.
struct About {
  std::string_view sentence;       ///< in --help and in docs/config.md
  std::string_view details = {};   ///< in docs/config.md, behind the sentence
  std::string_view option = {};    ///< of `zero train`: "--stage"
  std::string_view argument = {};  ///< what stands for its value in --help, where not the type
  /// What the option's words mean, where they are not the values: "bf16" is true.
  std::vector<std::pair<std::string_view, bool>> words = {};
  std::vector<std::string_view> also = {};  ///< other names of the key in its section
  /// Least value; of whole numbers, where not given, 0, or 1 with zero_is_none.
  std::optional<double> least = {};
  std::optional<double> most = {};   ///< greatest value
  std::optional<double> below = {};  ///< values are less
  int64_t multiple_of = 1;
  bool bytes = false;         ///< an integer that may be written as "6GB"
  bool zero_is_none = false;  ///< of an optional: 0 in a file or an option means that there is none
  bool not_empty = false;     ///< of a text
  Json only = {};             ///< the one value that is accepted; null: any
  std::string_view because = {};      ///< behind an error about `only`
  std::string_view replaced_by = {};  ///< what there is in place of a key that is gone
};

/// All of a row that does not depend on where the value lives.
struct Spec {
  std::string key;  ///< with dots between sections; empty: an option alone
  About about;
  Kind kind = Kind::boolean;
  std::vector<std::string> choices = {};  ///< Kind::choice
  Part part = Part::engine;

  /// What a value must be, for errors and documents: "a whole number, at least 1".
  std::string wanted(bool of_file = true) const;
  /// `value` as it is kept: whole numbers as int64, bytes as numbers, none as null. Throws
  /// ConfigError naming `name` where it is none that the field takes.
  Json normalize(const Json& value, std::string_view name) const;
  /// Throws where a value of the struct is none that the field takes.
  void verify(const Json& value) const;
  /// The same of the text of the option.
  Json from_option(std::string_view text) const;
  /// Is set by the option's presence alone.
  bool is_flag() const { return kind == Kind::boolean && about.words.empty(); }
};

/// One row: a value of `Root`.
template <class Root>
struct Field : Spec {
  /// Sets the value to a normalized one. None: the field is accepted, and changes nothing.
  std::function<void(Root&, const Json&)> set{};
  std::function<Json(const Root&)> get{};

  void read(Root& root, const Json& value, std::string_view name) const {
    auto normal = normalize(value, name);
    if (set) set(root, normal);
  }
  /// Throws ConfigError where the value of `root` is none that the field takes.
  void check(const Root& root) const {
    if (get) verify(get(root));
  }
};

// --- Rows from members ---

template <class Value>
struct Choices;  // specialised for each enumeration: `static constexpr std::pair<...> list[]`

template <class Value>
struct IsOptional : std::false_type {};
template <class Value>
struct IsOptional<std::optional<Value>> : std::true_type {};

template <class Value>
Spec spec_of(std::string key, About about) {
  Spec spec{std::move(key), std::move(about)};
  if constexpr (IsOptional<Value>::value) {
    return spec_of<typename Value::value_type>(std::move(spec.key), std::move(spec.about));
  } else if constexpr (std::is_enum_v<Value>) {
    spec.kind = Kind::choice;
    for (const auto& [name, value] : Choices<Value>::list) spec.choices.emplace_back(name);
  } else if constexpr (std::is_same_v<Value, bool>) {
    spec.kind = Kind::boolean;
  } else if constexpr (std::is_integral_v<Value>) {
    spec.kind = spec.about.bytes ? Kind::bytes : Kind::integer;
    if (!spec.about.least) spec.about.least = spec.about.zero_is_none ? 1 : 0;
    if constexpr (sizeof(Value) < sizeof(int64_t)) {
      if (!spec.about.most) spec.about.most = std::numeric_limits<Value>::max();
    }
  } else if constexpr (std::is_floating_point_v<Value>) {
    spec.kind = Kind::number;
  } else {
    spec.kind = Kind::text;
  }
  return spec;
}

template <class Value>
Value from_json(const Json& json) {
  if constexpr (IsOptional<Value>::value) {
    if (json.is_null()) return std::nullopt;
    return from_json<typename Value::value_type>(json);
  } else if constexpr (std::is_enum_v<Value>) {
    for (const auto& [name, value] : Choices<Value>::list) {
      if (json == name) return value;
    }
    return {};
  } else {
    return json.get<Value>();
  }
}

template <class Value>
Json to_json(const Value& value) {
  if constexpr (IsOptional<Value>::value) {
    return value ? to_json(*value) : Json();
  } else if constexpr (std::is_enum_v<Value>) {
    for (const auto& [name, named] : Choices<Value>::list) {
      if (named == value) return name;
    }
    return {};
  } else {
    return value;
  }
}

/// A row for the member that `path` leads to: &Settings::engine, &Config::stage.
template <class Root, class... Member>
Field<Root> field(std::string key, About about, Member... path) {
  using Value = std::remove_cvref_t<decltype((std::declval<Root&>().*....*path))>;
  Field<Root> row{spec_of<Value>(std::move(key), std::move(about))};
  row.set = [path...](Root& root, const Json& json) { (root.*....*path) = from_json<Value>(json); };
  row.get = [path...](const Root& root) { return to_json<Value>((root.*....*path)); };
  return row;
}

/// A row for a key that is checked and changes nothing.
template <class Root, class Value>
Field<Root> accepted(std::string key, About about) {
  return {spec_of<Value>(std::move(key), std::move(about))};
}

// --- Reading and writing by rows ---

/// The keys of a table: what may stand where.
class Keys {
 public:
  void add(const Spec& spec);
  void pass_over(std::string_view key) { foreign_.emplace_back(key); }
  /// Throws ConfigError for a key of `file` that no row has, with the nearest; and for a section
  /// that is no object. `prefix` stands before the keys in errors.
  void check(const Json& file, const std::string& prefix) const;

 private:
  struct Place {
    std::string key;
    bool section = false;
  };
  void check(const Json& object, const std::string& path, const std::string& prefix) const;
  std::vector<Place> places_;
  std::vector<std::string> foreign_;
};

/// The value that `file` gives the field, under any of its names; null where there is none, or
/// "auto" (which a text may be). Throws ConfigError where two names of it stand there.
const Json* find(const Json& file, const Spec& spec, const std::string& prefix);

/// Puts `value` at the key's place.
void put(Json& file, std::string_view key, Json value);

/// Sets of `root` what `file` names. The rows' order is that of reading.
template <class Root>
void read(Root& root, const std::vector<Field<Root>>& rows, const Json& file,
          const std::string& prefix = "", const std::vector<std::string>& foreign = {}) {
  Keys keys;
  for (const auto& row : rows) keys.add(row);
  for (const auto& key : foreign) keys.pass_over(key);
  keys.check(file, prefix);
  for (const auto& row : rows) {
    if (const auto* value = find(file, row, prefix)) row.read(root, *value, prefix + row.key);
  }
}

/// The JSON object that `read` reads back; it leaves out what there is none of.
template <class Root>
Json write(const Root& root, const std::vector<Field<Root>>& rows) {
  auto file = Json::object();
  for (const auto& row : rows) {
    if (!row.get || row.key.empty()) continue;
    if (auto value = row.get(root); !value.is_null()) put(file, row.key, std::move(value));
  }
  return file;
}

}  // namespace zero::fields
