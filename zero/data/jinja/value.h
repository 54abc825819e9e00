// Values of templates, with Python's meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "zero/base/error.h"

namespace zero::jinja {

/// A template cannot be read or rendered. The message has no line and no full stop.
class Fault : public Error {
  using Error::Error;
};

class Value;
struct Arguments;

using List = std::vector<Value>;
/// Entries stay in the order of insertion.
using Dict = std::vector<std::pair<std::string, Value>>;
using Function = std::function<Value(const Arguments&)>;

/// The value of a name that no variable has: it prints as nothing, and has no attributes.
struct Undefined {
  std::string name;
};

/// No value, with all that it holds, has more bytes, and none nests deeper: Note [Templates of
/// strangers].
inline constexpr size_t kMostBytes = size_t{64} << 20;
inline constexpr int kMostNesting = 100;

/// The bytes of a value. A part counts as often as it occurs in the whole.
struct Extent {
  size_t own = 0;    ///< what a copy of its elements, without theirs, takes
  size_t whole = 0;  ///< with all that its parts hold
  int depth = 0;     ///< of lists and dicts in each other
};

/// Lists and dicts are shared and never change, but for a namespace, which none of them holds.
/// Each constructor throws Fault for a value that is too large or nests too deeply.
class Value {
 public:
  Value() : data_(Undefined{}) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(std::nullptr_t) : data_(nullptr) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string value);
  Value(std::string_view value) : Value(std::string(value)) {}
  Value(const char* value) : Value(std::string(value)) {}
  Value(List list);
  Value(Dict dict);
  Value(Function function) : data_(std::make_shared<Function>(std::move(function))) {}
  /// Returns a dict that set_member changes.
  static Value name_space(Dict dict);
  /// Returns a list that prints in round brackets, and that no other kind of list equals.
  static Value tuple(List list);
  static Value from_json(const nlohmann::ordered_json& json);

  bool undefined() const { return is<Undefined>(); }
  bool none() const { return is<std::nullptr_t>(); }
  bool boolean() const { return is<bool>(); }
  bool integer() const { return is<int64_t>() || boolean(); }
  bool number() const { return integer() || is<double>(); }
  const std::string* string() const { return std::get_if<std::string>(&data_); }
  const List* list() const;
  const Dict* dict() const;
  const Function* function() const;
  bool changes() const;  ///< it is a namespace
  bool is_tuple() const;
  Extent extent() const;
  /// Throws Fault for a value that is no namespace.
  void set_member(const std::string& name, Value value) const;

  bool truth() const;
  /// Both throw Fault for what is no number.
  int64_t as_integer() const;
  double as_double() const;
  /// Returns the value as print() writes it.
  std::string text() const;
  std::string repr() const;
  /// Returns the value as json.dumps writes it, with ensure_ascii false; on one line if `indent` is
  /// negative.
  std::string json(int64_t indent = -1) const;
  /// Returns "a string" or the like, for messages.
  std::string_view kind() const;
  /// Returns the member of a dict, or nothing if it is absent.
  const Value* find(std::string_view key) const;
  /// Returns the elements of a list, the keys of a dict, or the characters of a string. Throws
  /// Fault for another value.
  List elements() const;

  bool operator==(const Value& other) const;
  /// Throws Fault for values that have no order.
  bool operator<(const Value& other) const;

 private:
  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }
  template <typename T>
  struct Shared;
  template <typename T>
  const Shared<T>* shared() const {
    const auto* held = std::get_if<std::shared_ptr<Shared<T>>>(&data_);
    return held == nullptr ? nullptr : held->get();
  }
  void write_repr(std::string& out) const;
  void write_json(std::string& out, int64_t indent, int64_t depth) const;

  std::variant<Undefined, std::nullptr_t, bool, int64_t, double, std::string,
               std::shared_ptr<Shared<List>>, std::shared_ptr<Shared<Dict>>,
               std::shared_ptr<Function>>
      data_;
};

/// Throws the Fault of a value that is too large.
[[noreturn]] void refuse_size();
/// Appends to a text. Throws Fault where it would become too large for a value.
void append(std::string& out, std::string_view more);
/// Sets a member of a dict, or adds it at its end.
void put(Dict& dict, const std::string& name, Value value);

/// Counts a rendering's work in bytes, so that no template runs for ever or fills the memory.
class Work {
 public:
  /// Throws Fault where the work becomes too much.
  void spend(size_t bytes) {
    if (bytes > left_) throw Fault("the template does not come to an end");
    left_ -= bytes;
  }

 private:
  size_t left_ = 3'000'000 * size_t{256};
};

/// A function, filter or test is called with these.
struct Arguments {
  List values;
  Dict named;
  Work* work = nullptr;  ///< borrowed; set where a template calls

  /// Returns the argument at `place`, or by `name`; `otherwise` where it is absent.
  Value get(size_t place, std::string_view name, Value otherwise = {}) const;
  /// Returns the bytes of all arguments.
  size_t bytes() const;
};

}  // namespace zero::jinja
