#include "zero/checkpoint/foreign/pickle.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero::foreign {

using Kind = Value::Kind;

bool Value::is_call(std::string_view name) const {
  return kind == Kind::object && callee->kind == Kind::global && callee->text == name;
}

bool Value::is_instance(std::string_view last_name) const {
  if (kind != Kind::object || callee->kind != Kind::global) return false;
  const auto name = callee->text;
  return name.ends_with(last_name) && name.size() > last_name.size() &&
         name[name.size() - last_name.size() - 1] == '.';
}

const Value* Value::argument(size_t index) const {
  if (arguments == nullptr || index >= arguments->items.size()) return nullptr;
  return arguments->items[index];
}

const Value* Value::find(std::string_view key) const {
  if (kind == Kind::object)
    return state != nullptr && state->kind == Kind::dict ? state->find(key) : nullptr;
  if (kind != Kind::dict) return nullptr;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i]->kind == Kind::text && items[i]->text == key) return items[i + 1];
  }
  return nullptr;
}

const Value* Value::member(std::string_view name, size_t position) const {
  if (state != nullptr && state->kind == Kind::dict) return state->find(name);
  return argument(position);
}

std::optional<int64_t> Value::as_integer() const {
  if (kind == Kind::integer || kind == Kind::boolean) return integer;
  return {};
}

std::optional<double> Value::as_number() const {
  if (kind == Kind::real) return real;
  if (const auto whole = as_integer()) return static_cast<double>(*whole);
  return {};
}

std::optional<std::string> Value::as_text() const {
  if (kind == Kind::text) return std::string(text);
  return {};
}

std::optional<std::vector<int64_t>> Value::as_sizes() const {
  if (is_call("torch.Size")) {
    const auto* list = argument(0);
    return list != nullptr && list->is_sequence() ? list->as_sizes()
                                                  : std::optional(std::vector<int64_t>{});
  }
  if (!is_sequence()) return {};
  std::vector<int64_t> sizes;
  for (const auto* item : items) {
    const auto size = item->as_integer();
    if (!size) return {};
    sizes.push_back(*size);
  }
  return sizes;
}

namespace {

// Returns a value as JSON, or nothing if it has no such form.
std::optional<nlohmann::ordered_json> json_of(const Value& value, size_t& steps, int depth) {
  steps += 1 + value.text.size() / 64;
  if (steps > kMostSteps || depth > kMaxJsonDepth / 2) return {};
  switch (value.kind) {
    case Kind::none:
      return nlohmann::ordered_json(nullptr);
    case Kind::boolean:
      return nlohmann::ordered_json(value.integer != 0);
    case Kind::integer:
      return nlohmann::ordered_json(value.integer);
    case Kind::real:
      return nlohmann::ordered_json(value.real);
    case Kind::text:
      return nlohmann::ordered_json(value.text);
    case Kind::list:
    case Kind::tuple: {
      auto list = nlohmann::ordered_json::array();
      for (const auto* item : value.items) {
        auto each = json_of(*item, steps, depth + 1);
        if (!each) return {};
        list.push_back(std::move(*each));
      }
      return list;
    }
    case Kind::dict: {
      auto object = nlohmann::ordered_json::object();
      for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
        const auto& key = *value.items[i];
        if (!key.is(Kind::text) && !key.is(Kind::integer)) return {};
        auto each = json_of(*value.items[i + 1], steps, depth + 1);
        if (!each) return {};
        object[key.is(Kind::text) ? std::string(key.text) : std::to_string(key.integer)] =
            std::move(*each);
      }
      return object;
    }
    default:
      return {};
  }
}

}  // namespace

std::optional<std::string> Value::as_json() const {
  size_t steps = 0;
  const auto json = json_of(*this, steps, 0);
  if (!json) return {};
  try {
    return json->dump();
  } catch (const nlohmann::json::exception&) {  // a text that is not UTF-8
    return {};
  }
}

// The stack machine. Each opcode takes a byte or more and makes at most one value.
class PickleMachine {
 public:
  explicit PickleMachine(Pickle& pickle)
      : bytes_(*pickle.bytes_), values_(*pickle.values_), own_(*pickle.texts_) {}

  const Value* run() {
    for (;;) {
      opcode_at_ = at_;
      const auto opcode = static_cast<uint8_t>(take(1)[0]);
      if (opcode == '.') {
        const auto* root = pop();
        if (!stack_.empty() || !marks_.empty())
          fail(fmt::format("it ends with {} values on the stack", stack_.size() + 1));
        return root;
      }
      step(opcode);
    }
  }
  size_t size() const { return at_; }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw CheckpointError(fmt::format("byte {}: {}", opcode_at_, why));
  }

  std::string_view take(uint64_t size) {
    if (size > bytes_.size() - at_)
      fail(fmt::format("{} bytes are wanted, and {} follow", size, bytes_.size() - at_));
    const auto piece = std::string_view(bytes_).substr(at_, size);
    at_ += size;
    return piece;
  }
  template <class Number>
  Number number() {
    Number value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n', at_);
    if (end == std::string::npos) fail("a line has no end");
    const auto text = take(end - at_);
    take(1);
    return text;
  }

  Value& make(Kind kind) {
    if (values_.size() >= kMostValues) fail(fmt::format("it has more than {} values", kMostValues));
    auto& value = values_.emplace_back();
    value.kind = kind;
    return value;
  }
  void push(const Value& value) { stack_.push_back(&value); }
  Value& push_new(Kind kind) {
    auto& value = make(kind);
    push(value);
    return value;
  }
  void push_integer(int64_t number, Kind kind = Kind::integer) { push_new(kind).integer = number; }
  void push_text(std::string_view text) { push_new(Kind::text).text = text; }
  // Pushes a text that is not in the file in this form.
  void push_own_text(std::string text) {
    own_.push_back(std::move(text));
    push_text(own_.back());
  }

  const Value* pop() {
    const auto* value = top();
    stack_.pop_back();
    return value;
  }
  const Value* top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("the stack is empty");
    return stack_.back();
  }
  Value& change(Kind kind, Kind or_kind) {
    auto& value = const_cast<Value&>(*top());  // the values in values_ are not const
    if (value.kind != kind && value.kind != or_kind)
      fail("it puts items into a value that takes none");
    return value;
  }
  std::vector<const Value*> pop_to_mark() {
    if (marks_.empty()) fail("no mark is on the stack");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const Value*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t size) {
    std::vector<const Value*> items(size);
    for (size_t i = size; i > 0; --i) items[i - 1] = pop();
    push_new(Kind::tuple).items = std::move(items);
  }

  void put(uint64_t key) { memo_[key] = top(); }
  void get(uint64_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) fail(fmt::format("it has put nothing into place {}", key));
    push(*found->second);
  }
  void add_items(std::vector<const Value*> items, bool pairs) {
    // Objects may have items too, if their class extends list or dict.
    auto& value = change(pairs ? Kind::dict : Kind::list, Kind::object);
    if (pairs && items.size() % 2 != 0) fail("a key has no value");
    value.items.insert(value.items.end(), items.begin(), items.end());
  }
  void push_global(std::string_view module, std::string_view name) {
    push_own_text(fmt::format("{}.{}", module, name));
    const_cast<Value&>(*top()).kind = Kind::global;
  }
  void call(const Value* callee, const Value* arguments) {
    if (!arguments->is(Kind::tuple)) fail("a call has no tuple of arguments");
    const bool ordered = callee->is(Kind::global) && callee->text == "collections.OrderedDict";
    auto& made = push_new(ordered ? Kind::dict : Kind::object);
    made.callee = callee;
    made.arguments = arguments;
    const auto* pairs = ordered && !arguments->items.empty() ? arguments->items[0] : nullptr;
    if (pairs == nullptr || !pairs->is_sequence()) return;
    for (const auto* pair : pairs->items) {
      if (!pair->is_sequence() || pair->items.size() != 2) fail("an OrderedDict has no pairs");
      made.items.insert(made.items.end(), pair->items.begin(), pair->items.end());
    }
  }
  void build() {
    const auto* state = pop();
    auto& object = const_cast<Value&>(*top());
    // An OrderedDict has attributes of its own (_metadata), which are dropped: only its items
    // count.
    if (object.is(Kind::object)) object.state = state;
  }
  void push_long(std::string_view digits) {
    if (digits.size() > sizeof(int64_t)) {
      push_new(Kind::large).text = digits;
      return;
    }
    int64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, digits.data(), digits.size());
    push_integer(value);
  }
  template <class Number>
  Number parsed(std::string_view digits) {
    Number value{};
    const auto* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value);
    if (error != std::errc{} || stop != end)
      fail(fmt::format("'{}' is no number", excerpt(std::string(digits))));
    return value;
  }
  void push_line_integer(std::string_view digits) {
    if (digits == "00" || digits == "01") return push_integer(digits == "01", Kind::boolean);
    if (digits.ends_with('L')) digits.remove_suffix(1);
    push_integer(parsed<int64_t>(digits));
  }

  void step(uint8_t opcode) {
    switch (opcode) {
      case 0x80:
        take(1);
        return;  // PROTO
      case 0x95:
        number<uint64_t>();
        return;  // FRAME
      case '(':
        marks_.push_back(stack_.size());
        return;
      case '0':  // POP
        if (!marks_.empty() && marks_.back() == stack_.size()) {
          marks_.pop_back();
        } else {
          pop();
        }
        return;
      case '1':
        pop_to_mark();
        return;
      case '2':
        push(*top());
        return;
      case 'N':
        push_new(Kind::none);
        return;
      case 0x88:
        return push_integer(1, Kind::boolean);
      case 0x89:
        return push_integer(0, Kind::boolean);
      case 'K':
        return push_integer(number<uint8_t>());
      case 'M':
        return push_integer(number<uint16_t>());
      case 'J':
        return push_integer(number<int32_t>());
      case 'I':
      case 'L':
        return push_line_integer(line());
      case 0x8a:
        return push_long(take(number<uint8_t>()));
      case 0x8b:
        return push_long(take(number<uint32_t>()));
      case 'G':
        push_new(Kind::real).real = big_endian();
        return;
      case 'F': {
        const auto value = parsed<double>(line());
        push_new(Kind::real).real = value;
        return;
      }
      case 'X':
        return push_text(take(number<uint32_t>()));  // texts and bytes
      case 'T':
      case 'B':
        return push_text(take(number<uint32_t>()));
      case 0x8c:
      case 'U':
      case 'C':
        return push_text(take(number<uint8_t>()));
      case 0x8d:
      case 0x8e:
      case 0x96:
        return push_text(take(number<uint64_t>()));
      case 'V':
        return push_text(line());
      case ']':
        push_new(Kind::list);
        return;
      case '}':
        push_new(Kind::dict);
        return;
      case 0x8f:  // EMPTY_SET
        push_new(Kind::list);
        return;
      case ')':
        push_new(Kind::tuple);
        return;
      case 't':
        return push_items(Kind::tuple);
      case 'l':
      case 0x91:
        return push_items(Kind::list);  // FROZENSET
      case 'd': {
        push_items(Kind::dict);
        if (top()->items.size() % 2 != 0) fail("a key has no value");
        return;
      }
      case 0x85:
        return push_tuple(1);
      case 0x86:
        return push_tuple(2);
      case 0x87:
        return push_tuple(3);
      case 'a': {
        const auto* item = pop();
        return add_items({item}, false);
      }
      case 'e':
      case 0x90: {  // ADDITEMS
        auto items = pop_to_mark();
        return add_items(std::move(items), false);
      }
      case 's': {
        const auto* value = pop();
        const auto* key = pop();
        return add_items({key, value}, true);
      }
      case 'u': {
        auto items = pop_to_mark();
        return add_items(std::move(items), true);
      }
      case 'q':
        return put(number<uint8_t>());
      case 'r':
        return put(number<uint32_t>());
      case 'p':
        return put(parsed<uint64_t>(line()));
      case 0x94:
        return put(memo_.size());
      case 'h':
        return get(number<uint8_t>());
      case 'j':
        return get(number<uint32_t>());
      case 'g':
        return get(parsed<uint64_t>(line()));
      case 'c': {
        const auto module = line();
        return push_global(module, line());
      }
      case 0x93: {
        const auto* name = pop();
        const auto* module = pop();
        if (!name->is(Kind::text) || !module->is(Kind::text)) fail("a name is no text");
        return push_global(module->text, name->text);
      }
      case 'R':
      case 0x81: {  // NEWOBJ
        const auto* arguments = pop();
        return call(pop(), arguments);
      }
      case 0x92: {  // NEWOBJ_EX
        pop();
        const auto* arguments = pop();
        return call(pop(), arguments);
      }
      case 'b':
        return build();
      case 'Q': {
        const auto* id = pop();
        push_new(Kind::persistent).arguments = id;
        return;
      }
      case 'P': {
        const auto id = line();
        auto& name = make(Kind::text);
        name.text = id;
        push_new(Kind::persistent).arguments = &name;
        return;
      }
      default:
        fail(fmt::format("opcode 0x{:02x} is not one that such files have", opcode));
    }
  }
  void push_items(Kind kind) {
    auto items = pop_to_mark();
    push_new(kind).items = std::move(items);
  }
  double big_endian() { return std::bit_cast<double>(__builtin_bswap64(number<uint64_t>())); }

  const std::string& bytes_;
  std::deque<Value>& values_;
  std::deque<std::string>& own_;
  std::vector<const Value*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, const Value*> memo_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
};

Pickle::Pickle(std::string bytes)
    : bytes_(std::make_unique<const std::string>(std::move(bytes))),
      values_(std::make_unique<std::deque<Value>>()),
      texts_(std::make_unique<std::deque<std::string>>()) {
  PickleMachine machine(*this);
  root_ = machine.run();
  size_ = machine.size();
}

namespace pickled {
namespace {

template <class Number>
std::string bytes_of(Number value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string joined(const std::vector<std::string>& items) {
  std::string all;
  for (const auto& item : items) all += item;
  return all;
}

}  // namespace

std::string text(std::string_view value) {
  return "X" + bytes_of(static_cast<uint32_t>(value.size())) + std::string(value);
}
std::string integer(int64_t value) {
  if (value >= 0 && value < 256) return "K" + bytes_of(static_cast<uint8_t>(value));
  if (value == static_cast<int32_t>(value)) return "J" + bytes_of(static_cast<int32_t>(value));
  return "\x8a\x08" + bytes_of(value);
}
std::string real(double value) {
  return "G" + bytes_of(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}
std::string boolean(bool value) { return value ? "\x88" : "\x89"; }
std::string none() { return "N"; }
std::string global(std::string_view module, std::string_view name) {
  return fmt::format("c{}\n{}\n", module, name);
}
std::string tuple(const std::vector<std::string>& items) { return "(" + joined(items) + "t"; }
std::string list(const std::vector<std::string>& items) { return "](" + joined(items) + "e"; }
std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string all = "}(";
  for (const auto& [key, value] : items) all.append(key).append(value);
  return all + "u";
}
std::string call(const std::string& function, const std::vector<std::string>& arguments) {
  return function + tuple(arguments) + "R";
}
std::string sizes(const std::vector<int64_t>& sizes) {
  std::vector<std::string> items;
  for (const auto size : sizes) items.push_back(integer(size));
  return call(global("torch", "Size"), {tuple(items)});
}
std::string whole(const std::string& value) { return "\x80\x02" + value + "."; }

}  // namespace pickled

}  // namespace zero::foreign
