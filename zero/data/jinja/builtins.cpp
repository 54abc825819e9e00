#include "zero/data/jinja/builtins.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "zero/data/tokenizers/characters.h"

namespace zero::jinja {
namespace {

constexpr size_t kMostElements = 1'000'000;

// As text.find(what, from), but in linear time.
size_t find_text(std::string_view text, std::string_view what, size_t from = 0) {
  if (from > text.size()) return std::string_view::npos;
  const auto* found = memmem(text.data() + from, text.size() - from, what.data(), what.size());
  if (found == nullptr) return std::string_view::npos;
  return static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

std::string need_string(const Value& value) {
  if (const auto* text = value.string()) return *text;
  throw Fault(fmt::format("a string is needed and not {}", value.kind()));
}

// Returns where each character begins, and the end.
std::vector<uint32_t> places_of(std::string_view text) {
  std::vector<uint32_t> places;
  for (size_t at = 0; at < text.size();) {
    places.push_back(static_cast<uint32_t>(at));
    tokenizers::next_character(text, at);
  }
  places.push_back(static_cast<uint32_t>(text.size()));
  return places;
}

size_t length_of(const Value& value) {
  const auto* text = value.string();
  return text != nullptr ? places_of(*text).size() - 1 : value.elements().size();
}

// ASCII alone changes; templates write keywords so.
std::string mapped(std::string text, int (*change)(int)) {
  for (auto& c : text) {
    if ((c & 0x80) == 0) c = static_cast<char>(change(c));
  }
  return text;
}

std::string stripped(std::string_view text, const Value& characters, bool left, bool right) {
  const bool white = characters.undefined() || characters.none();
  const auto listed = white ? std::string() : need_string(characters);
  std::set<std::string_view> dropped;
  for (size_t at = 0; at < listed.size();) {
    const size_t begin = at;
    tokenizers::next_character(listed, at);
    dropped.insert(std::string_view(listed).substr(begin, at - begin));
  }
  const auto drops = [&](int32_t c, std::string_view character) {
    return white ? tokenizers::is_white(c) : dropped.contains(character);
  };
  while (left && !text.empty()) {
    size_t at = 0;
    const auto c = tokenizers::next_character(text, at);
    if (!drops(c, text.substr(0, at))) break;
    text.remove_prefix(at);
  }
  while (right && !text.empty()) {
    size_t end = text.size();
    const auto c = tokenizers::previous_character(text, end);
    if (!drops(c, text.substr(end))) break;
    text = text.substr(0, end);
  }
  return std::string(text);
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     int64_t most) {
  if (from.empty()) throw Fault("the text to replace is empty");
  std::string out;
  size_t done = 0;
  const auto all = std::string_view(text);
  for (size_t at = find_text(text, from); at != std::string::npos && most != 0;
       at = find_text(text, from, done)) {
    append(out, all.substr(done, at - done));
    append(out, to);
    done = at + from.size();
    if (most > 0) --most;
  }
  append(out, all.substr(done));
  return out;
}

List split_text(const std::string& text, const Value& separator, int64_t most) {
  List parts;
  size_t bytes = 0;
  const auto add = [&](std::string_view part) {
    bytes += sizeof(Value) + part.size();
    if (bytes > kMostBytes) refuse_size();
    parts.emplace_back(part);
  };
  if (separator.undefined() || separator.none()) {
    const auto whole = stripped(text, {}, true, true);
    auto rest = std::string_view(whole);
    while (!rest.empty()) {
      size_t end = 0;
      for (size_t at = 0; at < rest.size(); end = at) {
        if (tokenizers::is_white(tokenizers::next_character(rest, at))) break;
      }
      if (most == 0) end = rest.size();
      if (most > 0) --most;
      add(rest.substr(0, end));
      for (size_t at = end; end < rest.size(); end = at) {
        if (!tokenizers::is_white(tokenizers::next_character(rest, at))) break;
      }
      rest.remove_prefix(end);
    }
    return parts;
  }
  const auto sign = need_string(separator);
  if (sign.empty()) throw Fault("the separator is empty");
  size_t done = 0;
  const auto all = std::string_view(text);
  for (size_t at = find_text(text, sign); at != std::string::npos && most != 0;
       at = find_text(text, sign, done)) {
    add(all.substr(done, at - done));
    done = at + sign.size();
    if (most > 0) --most;
  }
  add(all.substr(done));
  return parts;
}

std::string joined_text(const List& list, const std::string& separator) {
  std::string out;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) append(out, separator);
    append(out, list[i].text());
  }
  return out;
}

List pairs_of(const Value& value) {
  List pairs;
  if (value.undefined()) return pairs;
  if (value.dict() == nullptr)
    throw Fault(fmt::format("a dict is needed and not {}", value.kind()));
  for (const auto& [key, each] : *value.dict()) pairs.push_back(Value::tuple({key, each}));
  return pairs;
}

// Returns "a.b" of a dict.
Value attribute_of(Value value, std::string_view path) {
  while (true) {
    const auto name = path.substr(0, path.find('.'));
    const auto* found = value.find(name);
    value = found == nullptr ? Value(Undefined{std::string(name)}) : *found;
    if (name.size() == path.size()) return value;
    path.remove_prefix(name.size() + 1);
  }
}

void spend(const Arguments& a, size_t bytes) {
  if (a.work != nullptr) a.work->spend(bytes);
}

Arguments rest_of(const Arguments& a, size_t from, const Value& subject) {
  Arguments rest{{subject}, {}, a.work};
  for (size_t i = from; i < a.values.size(); ++i) rest.values.push_back(a.values[i]);
  spend(a, 256 + rest.bytes());
  return rest;
}

// The path is copied, and the dict is searched.
Value attribute(const Arguments& a, const Value& each, const std::string& path) {
  spend(a, 64 + path.size() + each.extent().own);
  return attribute_of(each, path);
}

// Implements select, reject, selectattr and rejectattr.
Value chosen(const Arguments& a, bool by_attribute, bool keep) {
  const size_t place = by_attribute ? 2 : 1;
  const auto* test = a.values.size() > place ? a.values[place].string() : nullptr;
  const auto function = test == nullptr ? nullptr : find_test(*test);
  if (test != nullptr && function == nullptr)
    throw Fault(fmt::format("the test '{}' is not supported", *test));
  List out;
  for (const auto& each : a.values[0].elements()) {
    const auto subject = by_attribute ? attribute(a, each, need_string(a.get(1, ""))) : each;
    const bool holds =
        function == nullptr ? subject.truth() : function(rest_of(a, place + 1, subject)).truth();
    if (holds == keep) out.push_back(each);
  }
  return out;
}

Value map_filter(const Arguments& a) {
  List out;
  const auto add = [&] { spend(a, sizeof(Value) + out.back().extent().own); };
  const auto attribute = a.get(99, "attribute");
  const auto otherwise = a.get(99, "default");
  for (const auto& each : a.values[0].elements()) {
    if (!attribute.undefined()) {
      const auto value = zero::jinja::attribute(a, each, need_string(attribute));
      out.push_back(value.undefined() && !otherwise.undefined() ? otherwise : value);
      add();
      continue;
    }
    const auto name = need_string(a.get(1, ""));
    const auto filter = find_filter(name);
    if (filter == nullptr) throw Fault(fmt::format("the filter '{}' is not supported", name));
    out.push_back(filter(rest_of(a, 2, each)));
    add();
  }
  return out;
}

// Returns the number that a text is, with or without a sign.
template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  if (text.starts_with('+') && !text.substr(1).starts_with('-')) text.remove_prefix(1);
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

int64_t whole(double number) {
  if (!(std::abs(number) < 9e18)) throw Fault("a number is too large");
  return static_cast<int64_t>(number);
}

Value to_integer(const Arguments& a) {
  const auto& value = a.values[0];
  if (value.integer()) return value.as_integer();
  if (value.number()) return whole(value.as_double());
  if (const auto base = a.get(2, "base", int64_t{10}); !(base == Value(int64_t{10})))
    throw Fault(fmt::format("the base {} of an integer is not supported", base.text()));
  if (const auto* text = value.string()) {
    const auto digits = stripped(*text, {}, true, true);
    if (const auto number = number_in<int64_t>(digits)) return *number;
    if (const auto number = number_in<double>(digits); number && std::isfinite(*number))
      return whole(*number);
  }
  return a.get(1, "default", int64_t{0});
}

Value extreme(const Value& value, bool first) {
  const auto all = value.elements();
  if (all.empty()) return Undefined{"an element of an empty list"};
  return first ? all.front() : all.back();
}

using Table = std::map<std::string_view, Builtin>;

const Table& filters() {
  static const Table table{
      {"tojson",
       [](const Arguments& a) {
         const auto indent = a.get(1, "indent", nullptr);
         return Value(a.values[0].json(indent.none() ? -1 : indent.as_integer()));
       }},
      {"trim",
       [](const Arguments& a) {
         return Value(stripped(a.values[0].text(), a.get(1, "chars"), true, true));
       }},
      {"length", [](const Arguments& a) { return Value(int64_t(length_of(a.values[0]))); }},
      {"count", [](const Arguments& a) { return Value(int64_t(length_of(a.values[0]))); }},
      {"string", [](const Arguments& a) { return Value(a.values[0].text()); }},
      {"safe", [](const Arguments& a) { return a.values[0]; }},
      {"default",
       [](const Arguments& a) {
         const bool use = a.values[0].undefined() ||
                          (a.get(2, "boolean", false).truth() && !a.values[0].truth());
         return use ? a.get(1, "default_value", "") : a.values[0];
       }},
      {"items", [](const Arguments& a) { return Value(pairs_of(a.values[0])); }},
      {"join",
       [](const Arguments& a) {
         return Value(joined_text(a.values[0].elements(), a.get(1, "d", "").text()));
       }},
      {"dictsort",
       [](const Arguments& a) {
         auto pairs = pairs_of(a.values[0]);
         std::stable_sort(pairs.begin(), pairs.end(), [](const Value& x, const Value& y) {
           return mapped((*x.list())[0].text(), std::tolower) <
                  mapped((*y.list())[0].text(), std::tolower);
         });
         return Value(pairs);
       }},
      {"list", [](const Arguments& a) { return Value(a.values[0].elements()); }},
      {"map", map_filter},
      {"upper", [](const Arguments& a) { return Value(mapped(a.values[0].text(), std::toupper)); }},
      {"lower", [](const Arguments& a) { return Value(mapped(a.values[0].text(), std::tolower)); }},
      {"capitalize",
       [](const Arguments& a) {
         auto text = mapped(a.values[0].text(), std::tolower);
         if (!text.empty()) text[0] = mapped(text.substr(0, 1), std::toupper)[0];
         return Value(text);
       }},
      {"replace",
       [](const Arguments& a) {
         return Value(replaced(a.values[0].text(), a.get(1, "old").text(), a.get(2, "new").text(),
                               a.get(3, "count", int64_t{-1}).as_integer()));
       }},
      {"select", [](const Arguments& a) { return chosen(a, false, true); }},
      {"reject", [](const Arguments& a) { return chosen(a, false, false); }},
      {"selectattr", [](const Arguments& a) { return chosen(a, true, true); }},
      {"rejectattr", [](const Arguments& a) { return chosen(a, true, false); }},
      {"first", [](const Arguments& a) { return extreme(a.values[0], true); }},
      {"last", [](const Arguments& a) { return extreme(a.values[0], false); }},
      {"reverse",
       [](const Arguments& a) {
         auto all = a.values[0].elements();
         std::reverse(all.begin(), all.end());
         return a.values[0].string() != nullptr ? Value(joined_text(all, "")) : Value(all);
       }},
      {"int", to_integer},
      {"abs",
       [](const Arguments& a) {
         const auto& x = a.values[0];
         if (!x.integer()) return Value(std::abs(x.as_double()));
         return x.as_integer() < 0 ? compute("-", int64_t{0}, x) : x;
       }},
  };
  return table;
}

const Table& tests() {
  static const Table table{
      {"defined", [](const Arguments& a) { return Value(!a.values[0].undefined()); }},
      {"undefined", [](const Arguments& a) { return Value(a.values[0].undefined()); }},
      {"none", [](const Arguments& a) { return Value(a.values[0].none()); }},
      {"string", [](const Arguments& a) { return Value(a.values[0].string() != nullptr); }},
      {"mapping", [](const Arguments& a) { return Value(a.values[0].dict() != nullptr); }},
      {"sequence",
       [](const Arguments& a) {
         const auto& x = a.values[0];
         return Value(x.list() != nullptr || x.dict() != nullptr || x.string() != nullptr);
       }},
      {"iterable",
       [](const Arguments& a) {
         const auto& x = a.values[0];
         return Value(x.list() != nullptr || x.dict() != nullptr || x.string() != nullptr ||
                      x.undefined());
       }},
      {"boolean", [](const Arguments& a) { return Value(a.values[0].boolean()); }},
      {"true",
       [](const Arguments& a) { return Value(a.values[0].boolean() && a.values[0].truth()); }},
      {"false",
       [](const Arguments& a) { return Value(a.values[0].boolean() && !a.values[0].truth()); }},
      {"number", [](const Arguments& a) { return Value(a.values[0].number()); }},
      {"integer",
       [](const Arguments& a) { return Value(a.values[0].integer() && !a.values[0].boolean()); }},
      {"equalto", [](const Arguments& a) { return Value(a.values[0] == a.get(1, "")); }},
      {"eq", [](const Arguments& a) { return Value(a.values[0] == a.get(1, "")); }},
      {"ne", [](const Arguments& a) { return Value(!(a.values[0] == a.get(1, ""))); }},
      {"in", [](const Arguments& a) { return Value(contains(a.get(1, ""), a.values[0])); }},
      {"even", [](const Arguments& a) { return Value(a.values[0].as_integer() % 2 == 0); }},
      {"odd", [](const Arguments& a) { return Value(a.values[0].as_integer() % 2 != 0); }},
      {"divisibleby",
       [](const Arguments& a) {
         return Value(compute("%", a.values[0], a.get(1, "")).as_integer() == 0);
       }},
  };
  return table;
}

Builtin find_in(const Table& table, std::string_view name) {
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

Value range(const Arguments& a) {
  int64_t begin = 0;
  int64_t end = a.get(0, "").as_integer();
  const int64_t step = a.get(2, "", int64_t{1}).as_integer();
  if (a.values.size() > 1) begin = std::exchange(end, a.values[1].as_integer());
  if (step == 0) throw Fault("the step of a range is 0");
  List out;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    if (out.size() == kMostElements) throw Fault("a range has over a million elements");
    out.emplace_back(i);
    // Beyond the last integer the range ends.
    if (int64_t next = 0; __builtin_add_overflow(i, step, &next)) break;
  }
  return out;
}

// With begin = exchange(end, ...) the first argument is the begin.
Value now(const Arguments& a) {
  const std::time_t time = std::time(nullptr);
  std::tm parts{};
  localtime_r(&time, &parts);
  std::array<char, 256> text{};
  const auto size =
      std::strftime(text.data(), text.size(), need_string(a.get(0, "")).c_str(), &parts);
  return std::string(text.data(), size);
}

Value method_of_string(const std::string& text, std::string_view name, const Arguments& a) {
  const auto ends = [&](const auto& holds) {
    const auto what = a.get(0, "");
    if (what.list() == nullptr) return Value(holds(need_string(what)));
    return Value(std::any_of(what.list()->begin(), what.list()->end(),
                             [&](const Value& each) { return holds(need_string(each)); }));
  };
  if (name == "split")
    return split_text(text, a.get(0, "sep"), a.get(1, "maxsplit", int64_t{-1}).as_integer());
  if (name == "startswith") return ends([&](const auto& what) { return text.starts_with(what); });
  if (name == "endswith") return ends([&](const auto& what) { return text.ends_with(what); });
  if (name == "strip") return stripped(text, a.get(0, ""), true, true);
  if (name == "lstrip") return stripped(text, a.get(0, ""), true, false);
  if (name == "rstrip") return stripped(text, a.get(0, ""), false, true);
  if (name == "upper") return mapped(text, std::toupper);
  if (name == "lower") return mapped(text, std::tolower);
  if (name == "capitalize" || name == "replace") {
    Arguments all{{text}, a.named, a.work};
    all.values.insert(all.values.end(), a.values.begin(), a.values.end());
    return find_filter(name)(all);
  }
  if (name == "join") return joined_text(a.get(0, "").elements(), text);
  if (name == "find") {
    const auto at = find_text(text, need_string(a.get(0, "")));
    return at == std::string::npos ? Value(int64_t{-1})
                                   : Value(int64_t(length_of(Value(text.substr(0, at)))));
  }
  throw Fault(fmt::format("the method '{}' of a string is not supported", name));
}

}  // namespace

Builtin find_filter(std::string_view name) {
  return find_in(filters(), name == "d" ? "default" : name);
}
Builtin find_test(std::string_view name) {
  if (name == "==") name = "eq";
  if (name == "!=") name = "ne";
  return find_in(tests(), name);
}

Value call_method(const Value& object, std::string_view name, const Arguments& a) {
  if (const auto* text = object.string()) return method_of_string(*text, name, a);
  if (const auto* members = object.dict()) {
    if (name == "items") return pairs_of(object);
    if (name == "keys") return object.elements();
    if (name == "get") {
      const auto* found = object.find(need_string(a.get(0, "")));
      return found == nullptr ? a.get(1, "", nullptr) : *found;
    }
    if (name == "values") {
      List out;
      for (const auto& member : *members) out.push_back(member.second);
      return out;
    }
  }
  if (object.undefined()) throw Fault(fmt::format("'{}' of an undefined value is called", name));
  throw Fault(fmt::format("the method '{}' of {} is not supported", name, object.kind()));
}

Dict functions() {
  const auto named = [](const Arguments& a) { return Value(Dict(a.named)); };
  const auto name_space = [](const Arguments& a) { return Value::name_space(a.named); };
  return {{"namespace", Value(Function(name_space))},
          {"dict", Value(Function(named))},
          {"range", Value(Function(range))},
          {"strftime_now", Value(Function(now))},
          {"raise_exception", Value(Function([](const Arguments& a) -> Value {
             throw Fault(fmt::format("the template says: {}", a.get(0, "").text()));
           }))}};
}

Value compute(std::string_view sign, const Value& x, const Value& y) {
  if (sign == "~") return x.text() + y.text();
  if (sign == "+" && x.string() != nullptr && y.string() != nullptr)
    return *x.string() + *y.string();
  if (sign == "+" && x.list() != nullptr && y.list() != nullptr && x.is_tuple() == y.is_tuple()) {
    auto all = *x.list();
    all.insert(all.end(), y.list()->begin(), y.list()->end());
    return x.is_tuple() ? Value::tuple(std::move(all)) : Value(std::move(all));
  }
  if (sign == "*" && x.string() != nullptr && y.integer()) {
    std::string out;
    if (x.string()->empty() || y.as_integer() <= 0) return out;
    const auto times = static_cast<size_t>(y.as_integer());
    if (times > kMostBytes / x.string()->size()) refuse_size();
    const size_t size = times * x.string()->size();
    for (out = *x.string(); out.size() < size;) {
      const auto half = out.substr(0, size - out.size());
      out += half;
    }
    return out;
  }
  if (!x.number() || !y.number()) {
    throw Fault(fmt::format("the operator '{}' between {} and {} is not supported", sign, x.kind(),
                            y.kind()));
  }
  const double a = x.as_double();
  const double b = y.as_double();
  if ((sign == "/" || sign == "//" || sign == "%") && b == 0) throw Fault("a division by zero");
  if (sign == "/") return a / b;
  if (sign == "**") {
    const double power = std::pow(a, b);
    const bool whole = x.integer() && y.integer() && b >= 0 && std::abs(power) < 9e15;
    return whole ? Value(static_cast<int64_t>(power)) : Value(power);
  }
  if (x.integer() && y.integer()) {
    const int64_t i = x.as_integer();
    const int64_t k = y.as_integer();
    int64_t result = 0;
    bool over = false;
    if (sign == "+") over = __builtin_add_overflow(i, k, &result);
    if (sign == "-") over = __builtin_sub_overflow(i, k, &result);
    if (sign == "*") over = __builtin_mul_overflow(i, k, &result);
    if (sign == "//" || sign == "%") {
      over = k == -1 && i == std::numeric_limits<int64_t>::min();
      if (!over) {
        const int64_t remainder = i % k;
        const bool other_sign = remainder != 0 && (remainder < 0) != (k < 0);
        result = sign == "%" ? remainder + (other_sign ? k : 0) : i / k - (other_sign ? 1 : 0);
      }
    }
    if (over) throw Fault("a number is too large");
    return result;
  }
  if (sign == "+") return a + b;
  if (sign == "-") return a - b;
  if (sign == "*") return a * b;
  if (sign == "//") return std::floor(a / b);
  return a - b * std::floor(a / b);
}

bool contains(const Value& container, const Value& element) {
  if (const auto* text = container.string())
    return find_text(*text, need_string(element)) != std::string::npos;
  const auto all = container.elements();
  return std::any_of(all.begin(), all.end(), [&](const Value& each) { return each == element; });
}

Value member_of(const Value& object, const Value& key) {
  if (const auto* list = object.list(); list != nullptr && key.integer()) {
    const auto size = static_cast<int64_t>(list->size());
    const int64_t index = key.as_integer() + (key.as_integer() < 0 ? size : 0);
    if (index < 0 || index >= size) return Undefined{"an element beyond the end"};
    return (*list)[static_cast<size_t>(index)];
  }
  if (const auto* text = object.string(); text != nullptr && key.integer()) {
    const auto places = places_of(*text);
    const auto size = static_cast<int64_t>(places.size()) - 1;
    const int64_t index = key.as_integer() + (key.as_integer() < 0 ? size : 0);
    if (index < 0 || index >= size) return Undefined{"a character beyond the end"};
    const auto at = static_cast<size_t>(index);
    return text->substr(places[at], places[at + 1] - places[at]);
  }
  if (object.undefined())
    throw Fault(fmt::format("'{}' of an undefined value is read", key.text()));
  const auto* name = key.string();
  const auto* found = name == nullptr ? nullptr : object.find(*name);
  return found == nullptr ? Value(Undefined{key.text()}) : *found;
}

Value slice_of(const Value& object, const Value& from, const Value& to, const Value& by) {
  const auto* text = object.string();
  const auto places = text == nullptr ? std::vector<uint32_t>() : places_of(*text);
  const auto all = text == nullptr ? object.elements() : List();
  const auto size = static_cast<int64_t>(text == nullptr ? all.size() : places.size() - 1);
  // A step beyond the size takes one element, as any such step does.
  const int64_t step = by.none() ? 1 : std::clamp(by.as_integer(), -size - 1, size + 1);
  if (step == 0) throw Fault("the step of a slice is 0");
  const auto place = [&](const Value& value, int64_t otherwise) {
    if (value.none()) return otherwise;
    const int64_t index = value.as_integer();
    return std::clamp(index < 0 ? std::max(index, -size) + size : index, int64_t{step < 0 ? -1 : 0},
                      step < 0 ? size - 1 : size);
  };
  const auto negative = [&](const Value& value) {  // beyond the beginning, backwards
    return step < 0 && !value.none() && value.as_integer() < -size;
  };
  const int64_t begin = negative(from) ? -1 : place(from, step < 0 ? size - 1 : 0);
  const int64_t end = negative(to) ? -1 : place(to, step < 0 ? -1 : size);
  List out;
  std::string cut;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    const auto at = static_cast<size_t>(i);
    if (text == nullptr) {
      out.push_back(all[at]);
    } else {
      cut.append(*text, places[at], places[at + 1] - places[at]);
    }
  }
  if (object.is_tuple()) return Value::tuple(std::move(out));
  return text == nullptr ? Value(std::move(out)) : Value(std::move(cut));
}

}  // namespace zero::jinja
