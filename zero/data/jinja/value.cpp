#include "zero/data/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "zero/data/tokenizers/characters.h"

namespace zero::jinja {
namespace {

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  return nlohmann::json(value).dump();
}

std::string python_quoted(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    if (c == quote || c == '\\') out += '\\';
    if (c == '\n' || c == '\t' || c == '\r') {
      out += c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\r";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out += quote;
}

}  // namespace

Value Value::from_json(const nlohmann::ordered_json& json) {
  if (json.is_null()) return nullptr;
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    List list;
    for (const auto& each : json) list.push_back(from_json(each));
    return list;
  }
  Dict dict;
  for (const auto& [key, each] : json.items()) dict.emplace_back(key, from_json(each));
  return dict;
}

bool Value::truth() const {
  if (undefined() || none()) return false;
  if (boolean()) return std::get<bool>(data_);
  if (number()) return as_double() != 0;
  if (const auto* text = string()) return !text->empty();
  if (const auto* all = list()) return !all->empty();
  if (const auto* members = dict()) return !members->empty();
  return true;
}

int64_t Value::as_integer() const {
  if (boolean()) return std::get<bool>(data_) ? 1 : 0;
  if (!is<int64_t>()) throw Fault(fmt::format("an integer is needed and not {}", kind()));
  return std::get<int64_t>(data_);
}

double Value::as_double() const {
  return is<double>() ? std::get<double>(data_) : static_cast<double>(as_integer());
}

std::string_view Value::kind() const {
  constexpr std::string_view kKinds[] = {
      "an undefined value", "none",   "a boolean", "an integer", "a number",
      "a string",           "a list", "a dict",    "a function"};
  return kKinds[data_.index()];
}

std::string Value::text() const {
  if (undefined()) return {};
  const auto* text = string();
  return text != nullptr ? *text : repr();
}

std::string Value::repr() const {
  if (undefined()) return "Undefined";
  if (none()) return "None";
  if (boolean()) return truth() ? "True" : "False";
  if (is<int64_t>()) return std::to_string(as_integer());
  if (is<double>()) return float_text(as_double());
  if (const auto* text = string()) return python_quoted(*text);
  std::string out;
  if (const auto* all = list()) {
    for (const auto& each : *all) out += (out.empty() ? "" : ", ") + each.repr();
    return "[" + out + "]";
  }
  if (const auto* members = dict()) {
    for (const auto& [key, each] : *members)
      out += (out.empty() ? "" : ", ") + python_quoted(key) + ": " + each.repr();
    return "{" + out + "}";
  }
  throw Fault("a function cannot be printed");
}

void Value::write_json(std::string& out, int64_t indent, int64_t depth) const {
  const auto line = [&](int64_t level) {
    if (indent >= 0) out.append("\n").append(static_cast<size_t>(indent * level), ' ');
  };
  const char* comma = indent < 0 ? ", " : ",";
  if (const auto* all = list()) {
    out += '[';
    for (size_t i = 0; i < all->size(); ++i) {
      if (i > 0) out += comma;
      line(depth + 1);
      (*all)[i].write_json(out, indent, depth + 1);
    }
    if (!all->empty()) line(depth);
    out += ']';
  } else if (const auto* members = dict()) {
    out += '{';
    for (size_t i = 0; i < members->size(); ++i) {
      if (i > 0) out += comma;
      line(depth + 1);
      out += nlohmann::json((*members)[i].first).dump() + ": ";
      (*members)[i].second.write_json(out, indent, depth + 1);
    }
    if (!members->empty()) line(depth);
    out += '}';
  } else if (const auto* text = string()) {
    out += nlohmann::json(*text).dump();
  } else if (none()) {
    out += "null";
  } else if (boolean()) {
    out += truth() ? "true" : "false";
  } else if (number()) {
    out += repr();
  } else {
    throw Fault(fmt::format("{} has no JSON", kind()));
  }
}

std::string Value::json(int64_t indent) const {
  if (indent > 16) throw Fault(fmt::format("the indent of JSON is {}", indent));
  std::string out;
  write_json(out, indent, 0);
  return out;
}

const Value* Value::find(std::string_view key) const {
  const auto* members = dict();
  if (members == nullptr) return nullptr;
  const auto found = std::find_if(members->begin(), members->end(),
                                  [&](const auto& member) { return member.first == key; });
  return found == members->end() ? nullptr : &found->second;
}

List Value::elements() const {
  if (const auto* all = list()) return *all;
  List out;
  if (const auto* members = dict()) {
    for (const auto& member : *members) out.emplace_back(member.first);
  } else if (const auto* text = string()) {
    for (size_t at = 0; at < text->size();) {
      const size_t begin = at;
      tokenizers::next_character(*text, at);
      out.emplace_back(text->substr(begin, at - begin));
    }
  } else if (!undefined()) {
    throw Fault(fmt::format("{} has no elements", kind()));
  }
  return out;
}

bool Value::operator==(const Value& other) const {
  if (number() && other.number()) return as_double() == other.as_double();
  if (data_.index() != other.data_.index()) return false;
  if (const auto* text = string()) return *text == *other.string();
  if (const auto* all = list()) return *all == *other.list();
  if (const auto* members = dict()) {
    if (members->size() != other.dict()->size()) return false;
    return std::all_of(members->begin(), members->end(), [&](const auto& member) {
      const auto* there = other.find(member.first);
      return there != nullptr && member.second == *there;
    });
  }
  return none() || undefined();
}

bool Value::operator<(const Value& other) const {
  if (number() && other.number()) return as_double() < other.as_double();
  if (string() != nullptr && other.string() != nullptr) return *string() < *other.string();
  throw Fault(fmt::format("{} and {} have no order", kind(), other.kind()));
}

Value Arguments::get(size_t place, std::string_view name, Value otherwise) const {
  if (place < values.size()) return values[place];
  for (const auto& [key, value] : named) {
    if (key == name) return value;
  }
  return otherwise;
}

}  // namespace zero::jinja
