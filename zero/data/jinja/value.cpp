#include "zero/data/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

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

void add_part(Extent& all, const Value& part) {
  if (part.changes()) throw Fault("a namespace in a list, a dict or a namespace is not supported");
  const auto of_part = part.extent();
  const bool shared = part.list() != nullptr || part.dict() != nullptr;
  all.own += sizeof(Value) + (shared ? 0 : of_part.own);
  all.whole += sizeof(Value) + of_part.whole;
  all.depth = std::max(all.depth, of_part.depth + 1);
  if (all.whole > kMostBytes) refuse_size();
  if (all.depth > kMostNesting) throw Fault("lists and dicts nest too deeply");
}

Extent measured(const List& list) {
  Extent all;
  for (const auto& each : list) add_part(all, each);
  return all;
}

Extent measured(const Dict& dict) {
  Extent all;
  for (const auto& [key, each] : dict) {
    const size_t bytes = sizeof(std::string) + key.size();
    all.own += bytes;
    all.whole += bytes;
    add_part(all, each);
  }
  return all;
}

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void refuse_size() { throw Fault(fmt::format("a value has over {} MiB", kMostBytes >> 20)); }

template <typename T>
struct Value::Shared {
  explicit Shared(T made, bool is_special = false)
      : items(std::move(made)), extent(measured(items)), special(is_special) {}

  T items;
  Extent extent;
  bool special;  // a dict is a namespace, a list a tuple
};

Value::Value(std::string value) : data_(std::move(value)) {
  if (string()->size() > kMostBytes) refuse_size();
}
Value::Value(List list) : data_(std::make_shared<Shared<List>>(std::move(list))) {}
Value::Value(Dict dict) : data_(std::make_shared<Shared<Dict>>(std::move(dict))) {}

Value Value::name_space(Dict dict) {
  Value made;
  made.data_ = std::make_shared<Shared<Dict>>(std::move(dict), true);
  return made;
}

Value Value::tuple(List list) {
  Value made;
  made.data_ = std::make_shared<Shared<List>>(std::move(list), true);
  return made;
}

const List* Value::list() const {
  const auto* held = shared<List>();
  return held == nullptr ? nullptr : &held->items;
}

const Dict* Value::dict() const {
  const auto* held = shared<Dict>();
  return held == nullptr ? nullptr : &held->items;
}

const Function* Value::function() const {
  const auto* held = std::get_if<std::shared_ptr<Function>>(&data_);
  return held == nullptr ? nullptr : held->get();
}

bool Value::changes() const {
  const auto* held = shared<Dict>();
  return held != nullptr && held->special;
}

bool Value::is_tuple() const {
  const auto* held = shared<List>();
  return held != nullptr && held->special;
}

Extent Value::extent() const {
  if (const auto* held = shared<List>()) return held->extent;
  if (const auto* held = shared<Dict>()) return held->extent;
  size_t size = 0;
  if (const auto* text = string()) size = text->size();
  if (undefined()) size = std::get<Undefined>(data_).name.size();
  return {size, size, 0};
}

void Value::set_member(const std::string& name, Value value) const {
  if (!changes()) throw Fault(fmt::format("{} is no namespace", kind()));
  Extent alone;
  add_part(alone, value);
  auto& space = *std::get<std::shared_ptr<Shared<Dict>>>(data_);
  put(space.items, name, std::move(value));
  space.extent = measured(space.items);
}

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
  return is_tuple() ? "a tuple" : kKinds[data_.index()];
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
  if (function() != nullptr) throw Fault("a function cannot be printed");
  std::string out;
  write_repr(out);
  return out;
}

void Value::write_repr(std::string& out) const {
  std::string_view comma;
  if (const auto* all = list()) {
    append(out, is_tuple() ? "(" : "[");
    for (const auto& each : *all) {
      append(out, std::exchange(comma, ", "));
      each.write_repr(out);
    }
    if (is_tuple() && all->size() == 1) append(out, ",");
    append(out, is_tuple() ? ")" : "]");
  } else if (const auto* members = dict()) {
    append(out, "{");
    for (const auto& [key, each] : *members) {
      append(out, std::exchange(comma, ", "));
      append(out, python_quoted(key) + ": ");
      each.write_repr(out);
    }
    append(out, "}");
  } else {
    append(out, repr());
  }
}

void Value::write_json(std::string& out, int64_t indent, int64_t depth) const {
  const auto line = [&](int64_t level) {
    if (indent >= 0) append(out, "\n" + std::string(static_cast<size_t>(indent * level), ' '));
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
      append(out, json_text((*members)[i].first) + ": ");
      (*members)[i].second.write_json(out, indent, depth + 1);
    }
    if (!members->empty()) line(depth);
    out += '}';
  } else if (const auto* text = string()) {
    append(out, json_text(*text));
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
      if ((out.size() + 1) * sizeof(Value) > kMostBytes) refuse_size();
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
  if (const auto* all = list()) return is_tuple() == other.is_tuple() && *all == *other.list();
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

void append(std::string& out, std::string_view more) {
  if (more.size() > kMostBytes - std::min(out.size(), kMostBytes)) refuse_size();
  out += more;
}

void put(Dict& dict, const std::string& name, Value value) {
  const auto found = std::find_if(dict.begin(), dict.end(),
                                  [&](const auto& member) { return member.first == name; });
  if (found == dict.end()) {
    dict.emplace_back(name, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

size_t Arguments::bytes() const {
  size_t all = 0;
  for (const auto& value : values) all += value.extent().own;
  for (const auto& [key, value] : named) all += value.extent().own;
  return all;
}

Value Arguments::get(size_t place, std::string_view name, Value otherwise) const {
  if (place < values.size()) return values[place];
  for (const auto& [key, value] : named) {
    if (key == name) return value;
  }
  return otherwise;
}

}  // namespace zero::jinja
