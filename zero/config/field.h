// The rows of a table of settings: Note [Table of settings] in settings.h. Private: it
// includes nlohmann-json.
//
// Note [What becomes of a key]
// A key acts if its row has a member or a setter. Any other key changes nothing. One warning names
// it, with the row's details, unless its value asks for nothing or for something that is so anyway
// (`holds`). If the row has `refused`, the key is an error that says what to use instead; a lenient
// reader warns. There is no warning for a key of a section that is switched off (a row whose key
// ends in ".enabled", or has `off`).
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/config/findings.h"
#include "zero/config/json.h"

namespace zero::fields {

/// The part of Settings that a field belongs to.
enum class Part { engine, model, program };

/// The kind of a value. `bytes` may be written as "6GB", `pair` is an array of two numbers, `texts`
/// is a text or an array of them, and `list` is any array. An option of `texts` may be repeated,
/// and one of `numbers` has commas between them.
enum class Kind {
  boolean,
  integer,
  bytes,
  number,
  numbers,
  pair,
  text,
  texts,
  choice,
  section,
  list,
  anything
};

/// The properties of a field beside its key and its member.
struct About {
  std::string_view sentence;       ///< in --help and in docs/config.md
  std::string_view details = {};   ///< in docs/config.md, behind the sentence
  std::string_view option = {};    ///< the option of `zero train`: "--stage"
  bool common = false;             ///< `zero train --help` shows the option; --help-all shows all
  std::string_view argument = {};  ///< its value in --help, if the type does not stand for it
  /// The words that the option takes if they differ from the values, with their meanings: "bf16" is
  /// true.
  std::vector<std::pair<std::string_view, bool>> words = {};
  bool alone = false;   ///< the option may stand without its value, which is empty then
  Json by_option = {};  ///< its value if the option is given, whatever the option's text; null:
                        ///< none
  std::vector<std::string_view> also = {};  ///< other names of the key in its section
  /// The least value; for whole numbers without one it is 0, or 1 with zero_is_none.
  std::optional<double> least = {};
  std::optional<double> most = {};   ///< greatest value
  std::optional<double> below = {};  ///< values are less
  int64_t multiple_of = 1;
  bool bytes = false;                 ///< an integer that may be written as "6GB"
  bool zero_is_none = false;          ///< for an optional: 0 in a file or an option means none
  bool not_empty = false;             ///< for a text
  bool null_first = false;            ///< for a pair: the first number may be null
  Json only = {};                     ///< the one value that is accepted; null: any
  std::string_view because = {};      ///< ends an error about `only`
  std::string_view replaced_by = {};  ///< what to use in place of a key that is gone
  /// Bytes, time or accuracy, for --explain; empty if there is no cost worth a word.
  std::string_view cost = {};
  /// The values of a key without effect that ask for nothing, or for something that is so anyway.
  std::vector<Json> holds = {};
  /// The remedy for values that are not among `holds`, which are refused.
  std::string_view refused = {};
  /// The values with which the row switches its section off; none: it is no switch.
  std::vector<Json> off = {};
  bool on_by_default = false;  ///< for a switch: its section is on without the key
  int off_levels = 1;          ///< how many levels up the switched section is
  bool acts_alone = false;     ///< the key acts even if its section is off
  /// Other words for the values of a choice, which may then be in any case.
  std::vector<std::pair<std::string_view, std::string_view>> spellings = {};
  /// The key of another row that an old name stands for, and `meaning` if its values differ.
  std::string_view stands_for = {};
  std::vector<std::pair<Json, Json>> meaning = {};
  /// "auto" means that the run decides, if that is not the default; the member is then empty.
  bool auto_is_none = false;
  /// Returns a warning about a value that does not act as it says; empty for other values.
  std::function<std::string(const Json&)> warn = {};
};

/// The part of a row that does not depend on where the value lives.
struct Spec {
  std::string key;  ///< with dots between sections; empty: an option alone
  About about;
  Kind kind = Kind::boolean;
  std::vector<std::string> choices = {};  ///< Kind::choice
  Part part = Part::engine;

  /// Says what a value must be, for errors and documents: "a whole number, at least 1".
  std::string wanted(bool of_file = true) const;
  /// Returns `value` in the form in which it is stored: whole numbers as int64, bytes as numbers,
  /// none as null. Throws ConfigError naming `name` if the field does not take the value.
  Json normalize(const Json& value, std::string_view name) const;
  /// Throws if the field does not take a value of the struct.
  void verify(const Json& value) const;
  /// Returns the value that the text of the option means. Throws as `normalize` does.
  Json from_option(std::string_view text) const;
  /// Returns whether the option's presence alone sets the field.
  bool is_flag() const {
    return kind == Kind::boolean && about.words.empty() && about.by_option.is_null();
  }
};

/// Gathers the findings about a file while it is read.
class Report {
 public:
  /// `collects`: refusals are findings too, and reading goes on.
  explicit Report(bool lenient = false, bool collects = false)
      : lenient_(lenient), collects_(collects) {}

  void add(Finding finding) { findings_.push_back(std::move(finding)); }
  /// Refuses an unknown key, or a value that cannot be used. Throws ConfigError unless it collects.
  void refuse(std::string key, std::string text);
  /// Refuses an unknown key. Warns of it if lenient, or if the key does no harm.
  void unknown(std::string key, std::string text, bool harmless);
  /// Says that no key of `section` (which ends in no dot) acts after all. `text` has the reason.
  void pass_over(const std::string& section, Effect effect, std::string text);
  /// Runs `body`, whose ConfigError is about `key`.
  void guard(const std::string& key, const std::function<void()>& body);
  /// Throws ConfigError with all that has been refused.
  void throw_refused() const;

  bool lenient() const { return lenient_; }
  const std::vector<Finding>& findings() const { return findings_; }

 private:
  bool lenient_;
  bool collects_;
  std::vector<Finding> findings_;
};

/// Sets a value of `Root` to a normalized one. The setter of a section may take the report too.
template <class Root>
class Setter {
 public:
  Setter() = default;
  template <class F>
  requires std::invocable<F&, Root&, const Json&, Report&> Setter(F set) : set_(std::move(set)) {}
  template <class F>
  requires std::invocable<F&, Root&, const Json&> Setter(F set)
      : set_([set = std::move(set)](Root& root, const Json& value, Report&) { set(root, value); }) {
  }
  explicit operator bool() const { return static_cast<bool>(set_); }
  void operator()(Root& root, const Json& value, Report& report) const {
    set_(root, value, report);
  }
  void operator()(Root& root, const Json& value) const {
    Report report;
    set_(root, value, report);
    report.throw_refused();
  }

 private:
  std::function<void(Root&, const Json&, Report&)> set_{};
};

/// One row: a value of `Root`.
template <class Root>
struct Field : Spec {
  /// None: the field is accepted, and changes nothing.
  Setter<Root> set{};
  std::function<Json(const Root&)> get{};

  void read(Root& root, const Json& value, std::string_view name, Report& report) const {
    auto normal = normalize(value, name);
    if (set) set(root, normal, report);
  }
  /// Throws ConfigError if the field does not take the value of `root`.
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
  } else if constexpr (std::is_same_v<Value, std::vector<Json>>) {
    spec.kind = Kind::list;
  } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
    spec.kind = Kind::texts;
  } else if constexpr (std::is_same_v<Value, std::vector<double>>) {
    spec.kind = Kind::numbers;
  } else if constexpr (std::is_same_v<Value, Json>) {
    spec.kind = Kind::anything;
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
  } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
    return value.size() > 1 ? Json(value) : Json(value.empty() ? std::string() : value.front());
  } else if constexpr (std::is_same_v<Value, std::vector<double>>) {
    return value.empty() ? Json() : Json(value);
  } else {
    return value;
  }
}

/// Makes a row for the member that `path` leads to: &Settings::engine, &Config::stage.
template <class Root, class... Member>
Field<Root> field(std::string key, About about, Member... path) {
  using Value = std::remove_cvref_t<decltype((std::declval<Root&>().*....*path))>;
  Field<Root> row{spec_of<Value>(std::move(key), std::move(about))};
  row.set = [path...](Root& root, const Json& json) { (root.*....*path) = from_json<Value>(json); };
  row.get = [path...](const Root& root) { return to_json<Value>((root.*....*path)); };
  return row;
}

/// Makes a row for a key that is checked and changes nothing.
template <class Root, class Value>
Field<Root> accepted(std::string key, About about) {
  return {spec_of<Value>(std::move(key), std::move(about))};
}

// --- Reading and writing by rows ---

/// The keys of a table, and their places. A part of a key that is "*" stands for any name.
class Keys {
 public:
  void add(const Spec& spec);
  void pass_over(std::string_view key) { foreign_.emplace_back(key); }
  /// Refuses a key of `file` that no row has, with the nearest; and a section that is no object.
  /// `prefix` stands before the keys in errors. Keys that begin with "_", "#" or "//" are notes. In
  /// a section for which `passes_over` is true unknown keys are a warning.
  void check(const Json& file, const std::string& prefix, Report& report,
             const std::function<bool(const std::string& section)>& passes_over) const;

 private:
  struct Place {
    std::string key;
    bool section = false;
  };
  void check(const Json& object, const std::string& path, const std::string& prefix, Report& report,
             const std::function<bool(const std::string& section)>& passes_over) const;
  const Place* place(const std::string& name) const;
  /// Returns a hint about the key that may have been meant by `key` of the section `path`.
  std::string hint(const std::string& key, const std::string& path) const;
  std::vector<Place> places_;
  std::vector<std::string> foreign_;
};

/// Returns one line for each text: the keys that it is about, sections that are switched on as a
/// whole, and the text.
std::vector<std::string> lines_of(std::span<const Finding> findings);

/// Returns the keys under which a field may stand: its own, and `also`.
std::vector<std::string> names_of(const Spec& spec);

/// Returns `file` with each key under its present name. Refuses two names of one key, and an old
/// name whose value cannot be used. If the report collects, it goes on without these keys.
Json with_present_names(Json file, const std::vector<const Spec*>& rows, const std::string& prefix,
                        Report& report);

/// Returns whether the section of the key `name` is off: a switch in `file` says so, or one that is
/// not on by default is left out. With `said` only the former counts.
bool is_switched_off(const Json& file, const std::vector<const Spec*>& rows,
                     const std::string& name, bool said);

/// Returns `value`; for another word for a choice, the word that the row has.
Json with_present_word(const Spec& spec, const Json& value);

/// Returns whether `value` means that the run's default holds: null, or "auto".
bool is_default(const Json& value);

/// Returns the value that `file` gives the key `name`; null if there is none, or if it is "auto"
/// (which a text may be).
const Json* find(const Json& file, const Spec& spec);

/// Returns the value at `key`, or null.
const Json* look_up(const Json& file, std::string_view key);

/// Puts `value` at the key's place.
void put(Json& file, std::string_view key, Json value);

/// Removes the value at the key's place, and sections that this leaves empty.
void remove(Json& file, std::string_view key);

/// Tells what becomes of the keys of `file`: Note [What becomes of a key]. `present` is `file` with
/// present names.
void tell_effects(const Json& file, const Json& present, const std::vector<const Spec*>& rows,
                  const std::vector<bool>& acts, const std::string& prefix, Report& report);

/// Sets the values of `root` that `file` names, and tells `report` what becomes of each key. Keys
/// are read in the order of the rows.
template <class Root>
void read(Root& root, const std::vector<Field<Root>>& rows, const Json& file,
          const std::string& prefix, Report& report, const std::vector<std::string>& foreign = {}) {
  Keys keys;
  std::vector<const Spec*> specs;
  std::vector<bool> acts;
  for (const auto& row : rows) {
    keys.add(row);
    specs.push_back(&row);
    acts.push_back(static_cast<bool>(row.set));
  }
  for (const auto& key : foreign) keys.pass_over(key);
  // DeepSpeed ignores unknown keys in these sections, too.
  keys.check(file, prefix, report, [&](const std::string& section) {
    return section == "aio" || section == "activation_checkpointing" ||
           section == "flops_profiler" || is_switched_off(file, specs, section + ".", true);
  });
  if (!file.is_object()) return;
  const auto present = with_present_names(file, specs, prefix, report);
  for (const auto& row : rows) {
    const auto* value = find(present, row);  // of "*" there is none: such keys set nothing
    if (value == nullptr) continue;
    const auto& only = row.about.only;
    // A wrong type is reported nevertheless, unless the file says that the section is off.
    if (!row.set && is_switched_off(present, specs, row.key, only.type() != value->type()))
      continue;
    if (report.lenient() && only.type() == value->type() && *value != only) continue;
    report.guard(prefix + row.key, [&] { row.read(root, *value, prefix + row.key, report); });
  }
  tell_effects(file, present, specs, acts, prefix, report);
}

/// Returns the JSON object that `read` reads back; it leaves out values that are none.
template <class Root>
Json write(const Root& root, const std::vector<Field<Root>>& rows) {
  auto file = Json::object();
  for (const auto& row : rows) {
    if (!row.get || row.key.empty()) continue;
    auto value = row.get(root);
    if (value.is_null() && row.about.auto_is_none) value = "auto";
    if (!value.is_null()) put(file, row.key, std::move(value));
  }
  return file;
}

}  // namespace zero::fields
