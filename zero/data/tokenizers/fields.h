// Reads members of a tokenizer's JSON. What is wrong is an Error whose message says what the object
// has, without a full stop, such as "names no 'type'".
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero::tokenizers {

using Json = nlohmann::json;

/// Returns the member, or null where it is absent.
inline const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

/// Returns the member, which must be of kind `T` (std::string, bool, or an unsigned number).
template <typename T>
T required(const Json& object, const char* key) {
  const auto& value = member(object, key);
  bool fits = value.is_number_unsigned();
  if constexpr (std::is_same_v<T, std::string>) fits = value.is_string();
  if constexpr (std::is_same_v<T, bool>) fits = value.is_boolean();
  if (!fits) {
    throw Error(value.is_null() ? fmt::format("names no '{}'", key)
                                : fmt::format("has the '{}' {}", key, excerpt(value.dump())));
  }
  return value.get<T>();
}

/// Returns the member, or `otherwise` where it is absent or null.
template <typename T>
T optional_member(const Json& object, const char* key, T otherwise) {
  return member(object, key).is_null() ? otherwise : required<T>(object, key);
}

/// Returns the array; an absent one is an error.
inline const Json& required_array(const Json& object, const char* key) {
  const auto& value = member(object, key);
  if (!value.is_array()) throw Error(fmt::format("has no array '{}'", key));
  return value;
}

/// Throws for a part of a tokenizer that libzero does not compute.
[[noreturn]] inline void unknown(std::string_view stage, std::string_view what) {
  throw Error(fmt::format("has the {} '{}', which libzero does not compute", stage, excerpt(what)));
}

}  // namespace zero::tokenizers
