// Values of templates, with Python's meaning.
#pragma once

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

/// Lists and dicts are shared and never change, but for a namespace.
class Value {
 public:
  Value() : data_(Undefined{}) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(std::nullptr_t) : data_(nullptr) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string value) : data_(std::move(value)) {}
  Value(std::string_view value) : data_(std::string(value)) {}
  Value(const char* value) : data_(std::string(value)) {}
  Value(List list) : data_(std::make_shared<List>(std::move(list))) {}
  Value(Dict dict) : data_(std::make_shared<Dict>(std::move(dict))) {}
  Value(Function function) : data_(std::make_shared<Function>(std::move(function))) {}
  static Value from_json(const nlohmann::ordered_json& json);

  bool undefined() const { return is<Undefined>(); }
  bool none() const { return is<std::nullptr_t>(); }
  bool boolean() const { return is<bool>(); }
  bool integer() const { return is<int64_t>() || boolean(); }
  bool number() const { return integer() || is<double>(); }
  const std::string* string() const { return std::get_if<std::string>(&data_); }
  const List* list() const { return pointee<List>(); }
  Dict* dict() const { return pointee<Dict>(); }
  const Function* function() const { return pointee<Function>(); }

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
  T* pointee() const {
    const auto* held = std::get_if<std::shared_ptr<T>>(&data_);
    return held == nullptr ? nullptr : held->get();
  }
  void write_json(std::string& out, int64_t indent, int64_t depth) const;

  std::variant<Undefined, std::nullptr_t, bool, int64_t, double, std::string, std::shared_ptr<List>,
               std::shared_ptr<Dict>, std::shared_ptr<Function>>
      data_;
};

/// A function, filter or test is called with these.
struct Arguments {
  List values;
  Dict named;

  /// Returns the argument at `place`, or by `name`; `otherwise` where it is absent.
  Value get(size_t place, std::string_view name, Value otherwise = {}) const;
};

}  // namespace zero::jinja
