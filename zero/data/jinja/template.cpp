#include "zero/data/jinja/template.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>

#include "zero/data/jinja/builtins.h"
#include "zero/data/jinja/lexer.h"

namespace zero::jinja {

/// A rendering has variables by scope, and the text so far.
class State {
 public:
  explicit State(Dict globals) : scopes_{std::move(globals)} {}

  Value look_up(const std::string& name) const {
    for (size_t i = scopes_.size(); i > 0; --i) {
      if (i > 1 && i <= hidden_end_) i = 1;  // a macro sees its own scopes and the outermost
      for (const auto& [key, value] : scopes_[i - 1]) {
        if (key == name) return value;
      }
    }
    return Undefined{name};
  }
  void set(const std::string& name, Value value) { put(scopes_.back(), name, std::move(value)); }
  static void put(Dict& dict, const std::string& name, Value value) {
    const auto found = std::find_if(dict.begin(), dict.end(),
                                    [&](const auto& member) { return member.first == name; });
    if (found == dict.end()) {
      dict.emplace_back(name, std::move(value));
    } else {
      found->second = std::move(value);
    }
  }

  /// Runs `body` in a scope of its own.
  template <typename Body>
  void in_scope(const Body& body) {
    scopes_.emplace_back();
    body();
    scopes_.pop_back();
  }
  /// Runs `body` as a macro does, and returns what it wrote.
  template <typename Body>
  std::string captured(bool as_macro, const Body& body) {
    if (++depth_ > kMostDepth) throw Fault("macros call each other too deeply");
    std::string outer;
    outer.swap(rendered.text);
    const size_t hidden = hidden_end_;
    if (as_macro) {
      hidden_end_ = scopes_.size();
      in_scope(body);
    } else {
      body();
    }
    hidden_end_ = hidden;
    --depth_;
    outer.swap(rendered.text);
    return outer;
  }
  bool capturing() const { return depth_ > 0; }
  /// Counts the work, so that no template runs for ever.
  void step() {
    if (++steps_ > kMostSteps || rendered.text.size() > kMostText)
      throw Fault("the template does not come to an end");
  }

  Rendered rendered;
  enum class Jump : unsigned char { none, broken, continued } jump = Jump::none;

 private:
  static constexpr int64_t kMostSteps = 3'000'000;
  static constexpr size_t kMostText = size_t{256} << 20;
  static constexpr int kMostDepth = 60;

  std::vector<Dict> scopes_;
  size_t hidden_end_ = 0;  // scopes [1, hidden_end_) are not seen
  int depth_ = 0;
  int64_t steps_ = 0;
};

namespace {

using Expression = std::function<Value(State&)>;
using Statement = std::function<void(State&)>;

// An error with a line, which is not given another one.
class Located : public Error {
  using Error::Error;
};

template <typename Body>
auto at_line(size_t line, const Body& body) {
  try {
    return body();
  } catch (const Fault& fault) {
    throw Located(fmt::format("line {}: {}", line, fault.what()));
  }
}

Value member_of(const Value& object, const Value& key) {
  if (const auto* list = object.list(); list != nullptr && key.integer()) {
    const auto size = static_cast<int64_t>(list->size());
    const int64_t index = key.as_integer() + (key.as_integer() < 0 ? size : 0);
    if (index < 0 || index >= size) return Undefined{"an element beyond the end"};
    return (*list)[static_cast<size_t>(index)];
  }
  if (object.string() != nullptr && key.integer()) return member_of(object.elements(), key);
  if (object.undefined())
    throw Fault(fmt::format("'{}' of an undefined value is read", key.text()));
  const auto* name = key.string();
  const auto* found = name == nullptr ? nullptr : object.find(*name);
  return found == nullptr ? Value(Undefined{key.text()}) : *found;
}

Value slice_of(const Value& object, const Value& from, const Value& to, const Value& by) {
  const auto all = object.elements();
  const auto size = static_cast<int64_t>(all.size());
  const int64_t step = by.none() ? 1 : by.as_integer();
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
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step)
    out.push_back(all[static_cast<size_t>(i)]);
  if (object.string() == nullptr) return out;
  std::string text;
  for (const auto& each : out) text += each.text();
  return text;
}

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Statement read() {
    auto body = block({});
    return body;
  }
  bool marks_generation() const { return marks_generation_; }

 private:
  // ---- tokens
  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool sees(std::string_view text) const {
    const auto& token = peek();
    return (token.kind == TokenKind::sign || token.kind == TokenKind::name) && token.text == text;
  }
  bool accept(std::string_view text) {
    if (!sees(text)) return false;
    take();
    return true;
  }
  [[noreturn]] void fail(std::string_view what) const {
    throw Located(fmt::format("line {}: {}", peek().line, what));
  }
  void expect(std::string_view text) {
    if (!accept(text)) fail(fmt::format("'{}' is expected before '{}'", text, peek().text));
  }
  void expect_end() {
    if (peek().kind != TokenKind::end_tag)
      fail(fmt::format("'{}' is not expected here", peek().text));
    take();
  }
  std::string name() {
    if (peek().kind != TokenKind::name) fail(fmt::format("'{}' is no name", peek().text));
    return take().text;
  }

  // Guards the parser's recursion.
  struct Depth {
    explicit Depth(Parser& parser) : depth(parser.depth_) {
      if (++depth > 150) parser.fail("the template nests too deeply");
    }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    ~Depth() { --depth; }
    int& depth;
  };

  // ---- statements
  // Reads until a block tag that begins with one of `ends`, which is not taken but for its `{%`.
  Statement block(const std::vector<std::string_view>& ends) {
    const Depth guard(*this);
    std::vector<Statement> all;
    while (true) {
      const auto& token = peek();
      if (token.kind == TokenKind::end) {
        if (!ends.empty()) fail(fmt::format("'{}' is missing", ends.back()));
        break;
      }
      if (token.kind == TokenKind::text) {
        all.emplace_back([text = take().text](State& state) { state.rendered.text += text; });
      } else if (token.kind == TokenKind::begin_print) {
        const size_t line = take().line;
        auto value = expression();
        expect_end();
        all.emplace_back([value = std::move(value), line](State& state) {
          state.rendered.text += at_line(line, [&] { return value(state).text(); });
        });
      } else {
        take();
        if (std::find(ends.begin(), ends.end(), peek().text) != ends.end()) break;
        all.push_back(statement());
      }
    }
    return [all = std::move(all)](State& state) {
      for (const auto& each : all) {
        each(state);
        if (state.jump != State::Jump::none) return;
      }
    };
  }

  Statement statement() {
    const size_t line = peek().line;
    const auto keyword = name();
    if (keyword == "if") return if_statement();
    if (keyword == "for") return for_statement(line);
    if (keyword == "set") return set_statement(line);
    if (keyword == "macro") return macro_statement(line);
    if (keyword == "generation") return generation_statement(line);
    if (keyword == "break" || keyword == "continue") {
      if (loops_ == 0) fail(fmt::format("'{}' outside of a loop", keyword));
      expect_end();
      const auto jump = keyword == "break" ? State::Jump::broken : State::Jump::continued;
      return [jump](State& state) { state.jump = jump; };
    }
    throw Located(fmt::format("line {}: the statement '{}' is not supported", line, keyword));
  }

  Statement if_statement() {
    struct Branch {
      Expression condition;
      Statement body;
      size_t line;
    };
    std::vector<Branch> branches;
    while (true) {
      const size_t line = peek().line;
      auto condition = expression();
      expect_end();
      branches.push_back({std::move(condition), block({"elif", "else", "endif"}), line});
      if (!accept("elif")) break;
    }
    Statement otherwise = [](State&) {};
    if (accept("else")) {
      expect_end();
      otherwise = block({"endif"});
    }
    expect("endif");
    expect_end();
    return [branches = std::move(branches), otherwise = std::move(otherwise)](State& state) {
      state.step();
      for (const auto& branch : branches) {
        if (at_line(branch.line, [&] { return branch.condition(state).truth(); }))
          return branch.body(state);
      }
      otherwise(state);
    };
  }

  static void bind(State& state, const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) return state.set(names[0], value);
    const auto parts = value.elements();
    if (parts.size() != names.size())
      throw Fault(fmt::format("{} names take {} values", names.size(), parts.size()));
    for (size_t i = 0; i < names.size(); ++i) state.set(names[i], parts[i]);
  }

  std::vector<std::string> names() {
    const bool bracket = accept("(");
    std::vector<std::string> all{name()};
    while (accept(",")) all.push_back(name());
    if (bracket) expect(")");
    return all;
  }

  Statement for_statement(size_t line) {
    auto variables = names();
    expect("in");
    auto source = or_expression();
    std::optional<Expression> condition;
    if (accept("if")) condition = expression();
    if (sees("recursive")) fail("a recursive loop is not supported");
    expect_end();
    ++loops_;
    auto body = block({"else", "endfor"});
    --loops_;
    Statement otherwise = [](State&) {};
    if (accept("else")) {
      expect_end();
      otherwise = block({"endfor"});
    }
    expect("endfor");
    expect_end();
    return [=](State& state) {
      auto all = at_line(line, [&] { return source(state).elements(); });
      if (condition) {
        List kept;
        for (const auto& each : all) {
          state.in_scope([&] {
            at_line(line, [&] {
              bind(state, variables, each);
              if ((*condition)(state).truth()) kept.push_back(each);
            });
          });
        }
        all = std::move(kept);
      }
      const auto size = static_cast<int64_t>(all.size());
      for (int64_t i = 0; i < size; ++i) {
        state.in_scope([&] {
          const auto at = static_cast<size_t>(i);
          at_line(line, [&] {
            state.step();
            bind(state, variables, all[at]);
          });
          state.set("loop", Dict{{"index", i + 1},
                                 {"index0", i},
                                 {"revindex", size - i},
                                 {"revindex0", size - i - 1},
                                 {"length", size},
                                 {"first", i == 0},
                                 {"last", i + 1 == size},
                                 {"previtem", i > 0 ? all[at - 1] : Value()},
                                 {"nextitem", i + 1 < size ? all[at + 1] : Value()}});
          body(state);
        });
        const auto jump = std::exchange(state.jump, State::Jump::none);
        if (jump == State::Jump::broken) break;
      }
      if (size == 0) otherwise(state);
    };
  }

  Statement set_statement(size_t line) {
    auto targets = names();
    std::string member;
    if (targets.size() == 1 && accept(".")) member = name();
    const auto assign = [targets, member](State& state, Value value) {
      if (member.empty()) return bind(state, targets, value);
      const auto space = state.look_up(targets[0]);
      if (space.dict() == nullptr) throw Fault(fmt::format("'{}' is no namespace", targets[0]));
      State::put(*space.dict(), member, std::move(value));
    };
    if (accept("=")) {
      auto value = list_expression();
      expect_end();
      return [=](State& state) { at_line(line, [&] { assign(state, value(state)); }); };
    }
    if (sees("|")) fail("a filter of a set block is not supported");
    expect_end();
    auto body = block({"endset"});
    expect("endset");
    expect_end();
    return [=](State& state) {
      auto text = at_line(line, [&] { return state.captured(false, [&] { body(state); }); });
      at_line(line, [&] { assign(state, std::move(text)); });
    };
  }

  Statement macro_statement(size_t line) {
    const auto macro = name();
    std::vector<std::pair<std::string, std::optional<Expression>>> parameters;
    expect("(");
    while (!accept(")")) {
      auto parameter = name();
      std::optional<Expression> otherwise;
      if (accept("=")) otherwise = expression();
      parameters.emplace_back(std::move(parameter), std::move(otherwise));
      if (!sees(")")) expect(",");
    }
    expect_end();
    const int loops = std::exchange(loops_, 0);
    auto body = block({"endmacro"});
    loops_ = loops;
    expect("endmacro");
    if (peek().kind == TokenKind::name) name();
    expect_end();
    return [=](State& state) {
      state.set(macro, Function([=, &state](const Arguments& arguments) -> Value {
                  if (arguments.values.size() > parameters.size())
                    throw Fault(fmt::format("the macro '{}' takes {} arguments and not {}", macro,
                                            parameters.size(), arguments.values.size()));
                  return at_line(line, [&] {
                    return Value(state.captured(true, [&] {
                      for (size_t i = 0; i < parameters.size(); ++i) {
                        const auto& [parameter, otherwise] = parameters[i];
                        auto value = arguments.get(i, parameter);
                        if (value.undefined() && otherwise) value = (*otherwise)(state);
                        state.set(parameter, std::move(value));
                      }
                      body(state);
                    }));
                  });
                }));
    };
  }

  Statement generation_statement(size_t line) {
    expect_end();
    marks_generation_ = true;
    auto body = block({"endgeneration"});
    expect("endgeneration");
    expect_end();
    return [=](State& state) {
      if (state.capturing()) {
        throw Located(fmt::format(
            "line {}: 'generation' within a macro or a set block is not supported", line));
      }
      const size_t begin = state.rendered.text.size();
      body(state);
      state.rendered.generated.emplace_back(begin, state.rendered.text.size());
    };
  }

  // ---- expressions
  Expression list_expression() {  // with commas: a list
    auto first = expression();
    if (!sees(",")) return first;
    std::vector<Expression> all{std::move(first)};
    while (accept(",")) {
      if (peek().kind == TokenKind::end_tag || sees(")")) break;
      all.push_back(expression());
    }
    return list_of(std::move(all));
  }

  static Expression list_of(std::vector<Expression> all) {
    return [all = std::move(all)](State& state) {
      List list;
      for (const auto& each : all) list.push_back(each(state));
      return Value(std::move(list));
    };
  }

  Expression expression() {
    const Depth guard(*this);
    auto value = or_expression();
    while (accept("if")) {
      auto condition = or_expression();
      Expression otherwise = [](State&) { return Value(); };
      if (accept("else")) otherwise = expression();
      value = [value = std::move(value), condition = std::move(condition),
               otherwise = std::move(otherwise)](State& state) {
        return condition(state).truth() ? value(state) : otherwise(state);
      };
    }
    return value;
  }

  Expression or_expression() {
    auto left = and_expression();
    while (accept("or")) {
      left = [left = std::move(left), right = and_expression()](State& state) {
        auto value = left(state);
        return value.truth() ? value : right(state);
      };
    }
    return left;
  }

  Expression and_expression() {
    auto left = not_expression();
    while (accept("and")) {
      left = [left = std::move(left), right = not_expression()](State& state) {
        auto value = left(state);
        return value.truth() ? right(state) : value;
      };
    }
    return left;
  }

  Expression not_expression() {
    const Depth guard(*this);
    if (!accept("not")) return comparison();
    return [value = not_expression()](State& state) { return Value(!value(state).truth()); };
  }

  Expression comparison() {
    auto left = sum();
    std::vector<std::pair<std::string, Expression>> rest;
    while (true) {
      std::string sign;
      for (const std::string_view each : {"==", "!=", "<=", ">=", "<", ">", "in"}) {
        if (sign.empty() && accept(each)) sign = each;
      }
      if (sign.empty() && sees("not") && peek(1).text == "in") {
        take();
        take();
        sign = "not in";
      }
      if (sign.empty()) break;
      rest.emplace_back(sign, sum());
    }
    if (rest.empty()) return left;
    return [left = std::move(left), rest = std::move(rest)](State& state) {
      auto before = left(state);
      for (const auto& [sign, expression] : rest) {
        auto value = expression(state);
        if (!compare(sign, before, value)) return Value(false);
        before = std::move(value);
      }
      return Value(true);
    };
  }

  static bool compare(std::string_view sign, const Value& left, const Value& right) {
    if (sign == "==") return left == right;
    if (sign == "!=") return !(left == right);
    if (sign == "<") return left < right;
    if (sign == ">") return right < left;
    if (sign == "<=") return !(right < left);
    if (sign == ">=") return !(left < right);
    return contains(right, left) == (sign == "in");
  }

  template <typename Next>
  Expression chain(std::initializer_list<std::string_view> signs, const Next& next) {
    auto left = next();
    while (true) {
      const auto found = std::find_if(signs.begin(), signs.end(), [&](auto sign) {
        return peek().kind == TokenKind::sign && peek().text == sign;
      });
      if (found == signs.end()) return left;
      take();
      left = [sign = *found, left = std::move(left), right = next()](State& state) {
        const auto first = left(state);
        return compute(sign, first, right(state));
      };
    }
  }

  Expression sum() {
    return chain({"+", "-"}, [this] {
      return chain({"~"}, [this] {
        return chain({"*", "/", "//", "%"}, [this] { return unary(); });
      });
    });
  }

  Expression unary() {
    const Depth guard(*this);
    if (accept("-")) {
      return [value = unary()](State& state) { return compute("-", int64_t{0}, value(state)); };
    }
    if (accept("+")) return unary();
    return chain({"**"}, [this] { return postfix(primary()); });
  }

  Expression primary() {
    const Depth guard(*this);
    const auto token = peek();
    if (token.kind == TokenKind::string) {
      std::string text;
      while (peek().kind == TokenKind::string) text += take().text;
      return [text](State&) { return Value(text); };
    }
    if (token.kind == TokenKind::integer || token.kind == TokenKind::number) {
      take();
      Value value;
      const auto* end = token.text.data() + token.text.size();
      int64_t integer = 0;
      double number = 0;
      const auto error = token.kind == TokenKind::integer
                             ? std::from_chars(token.text.data(), end, integer).ec
                             : std::from_chars(token.text.data(), end, number).ec;
      if (error != std::errc()) fail(fmt::format("the number {} is too large", token.text));
      value = token.kind == TokenKind::integer ? Value(integer) : Value(number);
      return [value](State&) { return value; };
    }
    if (token.kind == TokenKind::name) {
      take();
      if (token.text == "true" || token.text == "True") return [](State&) { return Value(true); };
      if (token.text == "false" || token.text == "False")
        return [](State&) { return Value(false); };
      if (token.text == "none" || token.text == "None")
        return [](State&) { return Value(nullptr); };
      return [name = token.text](State& state) { return state.look_up(name); };
    }
    if (accept("(")) {
      if (accept(")")) return list_of({});
      auto inner = list_expression();
      expect(")");
      return inner;
    }
    if (accept("[")) {
      std::vector<Expression> all;
      while (!accept("]")) {
        all.push_back(expression());
        if (!sees("]")) expect(",");
      }
      return list_of(std::move(all));
    }
    if (accept("{")) return dict();
    fail(fmt::format("'{}' is not expected here", token.text));
  }

  Expression dict() {
    std::vector<std::pair<Expression, Expression>> members;
    while (!accept("}")) {
      auto key = expression();
      expect(":");
      members.emplace_back(std::move(key), expression());
      if (!sees("}")) expect(",");
    }
    return [members = std::move(members)](State& state) {
      Dict made;
      for (const auto& [key, value] : members) State::put(made, key(state).text(), value(state));
      return Value(std::move(made));
    };
  }

  struct Call {
    std::vector<Expression> values;
    std::vector<std::pair<std::string, Expression>> named;

    Arguments arguments(State& state) const {
      Arguments made;
      add_to(made, state);
      return made;
    }
    void add_to(Arguments& made, State& state) const {
      for (const auto& each : values) made.values.push_back(each(state));
      for (const auto& [key, each] : named) made.named.emplace_back(key, each(state));
    }
  };

  // Behind the opening bracket.
  Call call() {
    Call made;
    while (!accept(")")) {
      if (sees("*") || sees("**")) fail("unpacked arguments are not supported");
      if (peek().kind == TokenKind::name && peek(1).kind == TokenKind::sign &&
          peek(1).text == "=") {
        auto key = name();
        take();
        made.named.emplace_back(std::move(key), expression());
      } else {
        made.values.push_back(expression());
      }
      if (!sees(")")) expect(",");
    }
    return made;
  }

  Expression postfix(Expression value) {
    while (true) {
      if (accept(".")) {
        value = attribute(std::move(value));
      } else if (accept("[")) {
        value = index(std::move(value));
      } else if (accept("(")) {
        value = [value = std::move(value), made = call()](State& state) {
          state.step();
          const auto function = value(state);
          if (function.function() == nullptr)
            throw Fault(fmt::format("{} is called", function.kind()));
          return (*function.function())(made.arguments(state));
        };
      } else if (accept("|")) {
        value = filter(std::move(value));
      } else if (sees("is")) {
        take();
        value = test(std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression attribute(Expression object) {
    const auto member = peek().kind == TokenKind::integer
                            ? Value(static_cast<int64_t>(std::stoi(take().text)))
                            : Value(name());
    if (!accept("(")) {
      return [object = std::move(object), member](State& state) {
        return member_of(object(state), member);
      };
    }
    return [object = std::move(object), member, made = call()](State& state) {
      state.step();
      const auto value = object(state);
      const auto* found = value.find(member.text());
      if (found != nullptr && found->function() != nullptr)
        return (*found->function())(made.arguments(state));
      return call_method(value, member.text(), made.arguments(state));
    };
  }

  Expression index(Expression object) {
    std::vector<std::optional<Expression>> parts(1);
    while (!accept("]")) {
      if (accept(":")) {
        parts.emplace_back();
        if (parts.size() > 3) fail("a slice has over three parts");
      } else {
        parts.back() = expression();
      }
    }
    if (parts.size() == 1) {
      if (!parts[0]) fail("an index is missing");
      return [object = std::move(object), key = *parts[0]](State& state) {
        const auto value = object(state);
        return member_of(value, key(state));
      };
    }
    parts.resize(3);
    return [object = std::move(object), parts](State& state) {
      const auto part = [&](size_t i) { return parts[i] ? (*parts[i])(state) : Value(nullptr); };
      return slice_of(object(state), part(0), part(1), part(2));
    };
  }

  Expression filter(Expression value) {
    const auto filter_name = name();
    const auto function = find_filter(filter_name);
    if (function == nullptr) fail(fmt::format("the filter '{}' is not supported", filter_name));
    Call made;
    if (accept("(")) made = call();
    return apply(function, std::move(value), std::move(made), false);
  }

  Expression test(Expression value) {
    const bool negated = accept("not");
    const auto test_name = name();
    const auto function = find_test(test_name);
    if (function == nullptr) fail(fmt::format("the test '{}' is not supported", test_name));
    Call made;
    const auto& next = peek();
    const bool operand = next.kind == TokenKind::string || next.kind == TokenKind::integer ||
                         (next.kind == TokenKind::name && next.text != "and" && next.text != "or" &&
                          next.text != "else" && next.text != "if" && next.text != "is" &&
                          next.text != "not" && next.text != "in") ||
                         sees("[");
    if (accept("(")) {
      made = call();
    } else if (operand) {
      made.values.push_back(primary());
    }
    return apply(function, std::move(value), std::move(made), negated);
  }

  static Expression apply(Builtin function, Expression value, Call made, bool negated) {
    return [=](State& state) {
      state.step();
      Arguments arguments;
      arguments.values.push_back(value(state));
      made.add_to(arguments, state);
      auto result = function(arguments);
      return negated ? Value(!result.truth()) : result;
    };
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  bool marks_generation_ = false;
};

}  // namespace

Template::Template(std::string_view text) {
  Parser parser(tokens_of(text));
  body_ = parser.read();
  marks_generation_ = parser.marks_generation();
}

Rendered Template::render(const Dict& variables) const {
  auto globals = functions();
  for (const auto& [name, value] : variables) State::put(globals, name, value);
  State state(std::move(globals));
  body_(state);
  return std::move(state.rendered);
}

}  // namespace zero::jinja
