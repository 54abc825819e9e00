#include "zero/data/jinja/expressions.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <optional>

#include "zero/data/jinja/builtins.h"

namespace zero::jinja {

namespace {

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenReader& in) : in_(in) {}

  Expression list_expression() {
    auto first = expression();
    if (!in_.sees(",")) return first;
    std::vector<Expression> all{std::move(first)};
    while (in_.accept(",")) {
      if (in_.peek().kind == TokenKind::end_tag || in_.sees(")")) break;
      all.push_back(expression());
    }
    return tuple_of(std::move(all));
  }

  Expression expression() {
    const TokenReader::Depth guard(in_);
    auto value = or_expression();
    while (in_.accept("if")) {
      count_link();
      auto condition = or_expression();
      Expression otherwise = [](State&) { return Value(); };
      if (in_.accept("else")) otherwise = expression();
      value = [value = std::move(value), condition = std::move(condition),
               otherwise = std::move(otherwise)](State& state) {
        return condition(state).truth() ? value(state) : otherwise(state);
      };
    }
    return value;
  }

  Expression or_expression() {
    auto left = and_expression();
    while (in_.accept("or")) {
      count_link();
      left = [left = std::move(left), right = and_expression()](State& state) {
        auto value = left(state);
        return value.truth() ? value : right(state);
      };
    }
    return left;
  }

 private:
  static List values_of(const std::vector<Expression>& all, State& state) {
    List list;
    for (const auto& each : all) list.push_back(each(state));
    return list;
  }
  static Expression list_of(std::vector<Expression> all) {
    return [all = std::move(all)](State& state) { return made(state, values_of(all, state)); };
  }
  static Expression tuple_of(std::vector<Expression> all) {
    return [all = std::move(all)](State& state) {
      return made(state, Value::tuple(values_of(all, state)));
    };
  }

  // Operators that follow each other nest to the left, so as a value runs, and as it is destroyed.
  void count_link() {
    if (++links_ > 1000) in_.fail("an expression has over 1000 operators");
  }

  // A list or a dict that is made costs its bytes.
  static Value made(State& state, Value value) {
    state.work.spend(value.extent().own);
    return value;
  }

  Expression and_expression() {
    auto left = not_expression();
    while (in_.accept("and")) {
      count_link();
      left = [left = std::move(left), right = not_expression()](State& state) {
        auto value = left(state);
        return value.truth() ? right(state) : value;
      };
    }
    return left;
  }

  Expression not_expression() {
    const TokenReader::Depth guard(in_);
    if (!in_.accept("not")) return comparison();
    return [value = not_expression()](State& state) { return Value(!value(state).truth()); };
  }

  Expression comparison() {
    auto left = sum();
    std::vector<std::pair<std::string, Expression>> rest;
    while (true) {
      std::string sign;
      for (const std::string_view each : {"==", "!=", "<=", ">=", "<", ">", "in"}) {
        if (sign.empty() && in_.accept(each)) sign = each;
      }
      if (sign.empty() && in_.sees("not") && in_.peek(1).text == "in") {
        in_.take();
        in_.take();
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
        state.work.spend(std::min(before.extent().whole, value.extent().whole));
        if (sign.ends_with("in")) state.work.spend(value.extent().own);
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
        return in_.peek().kind == TokenKind::sign && in_.peek().text == sign;
      });
      if (found == signs.end()) return left;
      in_.take();
      count_link();
      left = [sign = *found, left = std::move(left), right = next()](State& state) {
        const auto first = left(state);
        return made(state, compute(sign, first, right(state)));
      };
    }
  }

  Expression sum() {
    return chain({"+", "-"}, [this] {
      return chain({"~"}, [this] {
        return chain({"*", "/", "//", "%"},
                     [this] { return chain({"**"}, [this] { return signed_value(true); }); });
      });
    });
  }

  // A sign binds tighter than filters, tests and powers: "-5|abs" is 5, and "-2**2" is 4.
  Expression signed_value(bool filters) {
    const TokenReader::Depth guard(in_);
    if (in_.accept("-")) {
      return postfix([value = signed_value(false)](
                         State& state) { return compute("-", int64_t{0}, value(state)); },
                     filters);
    }
    return postfix(in_.accept("+") ? signed_value(false) : primary(), filters);
  }

  Expression primary() {
    const TokenReader::Depth guard(in_);
    const auto token = in_.peek();
    if (token.kind == TokenKind::string) {
      std::string text;
      while (in_.peek().kind == TokenKind::string) text += in_.take().text;
      return [text](State&) { return Value(text); };
    }
    if (token.kind == TokenKind::integer || token.kind == TokenKind::number) {
      in_.take();
      Value value;
      const auto* end = token.text.data() + token.text.size();
      int64_t integer = 0;
      double number = 0;
      const auto error = token.kind == TokenKind::integer
                             ? std::from_chars(token.text.data(), end, integer).ec
                             : std::from_chars(token.text.data(), end, number).ec;
      if (error != std::errc()) in_.fail(fmt::format("the number {} is too large", token.text));
      value = token.kind == TokenKind::integer ? Value(integer) : Value(number);
      return [value](State&) { return value; };
    }
    if (token.kind == TokenKind::name) {
      in_.take();
      if (token.text == "true" || token.text == "True") return [](State&) { return Value(true); };
      if (token.text == "false" || token.text == "False")
        return [](State&) { return Value(false); };
      if (token.text == "none" || token.text == "None")
        return [](State&) { return Value(nullptr); };
      return [name = token.text](State& state) { return state.look_up(name); };
    }
    if (in_.accept("(")) {
      if (in_.accept(")")) return tuple_of({});
      auto inner = list_expression();
      in_.expect(")");
      return inner;
    }
    if (in_.accept("[")) {
      std::vector<Expression> all;
      while (!in_.accept("]")) {
        all.push_back(expression());
        if (!in_.sees("]")) in_.expect(",");
      }
      return list_of(std::move(all));
    }
    if (in_.accept("{")) return dict();
    in_.fail(fmt::format("'{}' is not expected here", token.text));
  }

  Expression dict() {
    std::vector<std::pair<Expression, Expression>> members;
    while (!in_.accept("}")) {
      auto key = expression();
      in_.expect(":");
      members.emplace_back(std::move(key), expression());
      if (!in_.sees("}")) in_.expect(",");
    }
    return [members = std::move(members)](State& state) {
      Dict all;
      for (const auto& [key, value] : members) {
        state.work.spend(all.size());
        put(all, key(state).text(), value(state));
      }
      return made(state, std::move(all));
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
      made.work = &state.work;
      state.work.spend(made.bytes());
    }
  };

  // Behind the opening bracket.
  Call call() {
    Call made;
    while (!in_.accept(")")) {
      if (in_.sees("*") || in_.sees("**")) in_.fail("unpacked arguments are not supported");
      if (in_.peek().kind == TokenKind::name && in_.peek(1).kind == TokenKind::sign &&
          in_.peek(1).text == "=") {
        auto key = in_.name();
        in_.take();
        made.named.emplace_back(std::move(key), expression());
      } else {
        made.values.push_back(expression());
      }
      if (!in_.sees(")")) in_.expect(",");
    }
    return made;
  }

  Expression postfix(Expression value, bool filters) {
    for (;; count_link()) {
      if (in_.accept(".")) {
        value = attribute(std::move(value));
      } else if (in_.accept("[")) {
        value = index(std::move(value));
      } else if (in_.accept("(")) {
        value = [value = std::move(value), call = call()](State& state) {
          state.step();
          const auto function = value(state);
          if (function.function() == nullptr)
            throw Fault(fmt::format("{} is called", function.kind()));
          return made(state, (*function.function())(call.arguments(state)));
        };
      } else if (filters && in_.accept("|")) {
        value = filter(std::move(value));
      } else if (filters && in_.sees("is")) {
        in_.take();
        value = test(std::move(value));
      } else {
        return value;
      }
    }
  }

  Expression attribute(Expression object) {
    Value member;
    if (in_.peek().kind == TokenKind::integer) {
      const auto digits = in_.take().text;
      int64_t place = 0;
      const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), place);
      member = read.ec == std::errc() ? place : std::numeric_limits<int64_t>::max();
    } else {
      member = in_.name();
    }
    if (!in_.accept("(")) {
      return [object = std::move(object), member](State& state) {
        return member_at(state, object(state), member);
      };
    }
    return [object = std::move(object), member, call = call()](State& state) {
      state.step();
      const auto value = object(state);
      const auto* found = value.find(member.text());
      if (found != nullptr && found->function() != nullptr)
        return made(state, (*found->function())(call.arguments(state)));
      if (value.dict() != nullptr) made(state, value);
      return made(state, call_method(value, member.text(), call.arguments(state)));
    };
  }

  static Value member_at(State& state, const Value& object, const Value& key) {
    if (object.dict() != nullptr) state.work.spend(object.dict()->size());
    return member_of(object, key);
  }

  Expression index(Expression object) {
    std::vector<std::optional<Expression>> parts(1);
    while (!in_.accept("]")) {
      if (in_.accept(":")) {
        parts.emplace_back();
        if (parts.size() > 3) in_.fail("a slice has over three parts");
      } else {
        parts.back() = expression();
      }
    }
    if (parts.size() == 1) {
      if (!parts[0]) in_.fail("an index is missing");
      return [object = std::move(object), key = *parts[0]](State& state) {
        const auto value = object(state);
        return member_at(state, value, key(state));
      };
    }
    parts.resize(3);
    return [object = std::move(object), parts](State& state) {
      const auto part = [&](size_t i) { return parts[i] ? (*parts[i])(state) : Value(nullptr); };
      const auto value = made(state, object(state));
      return made(state, slice_of(value, part(0), part(1), part(2)));
    };
  }

  Expression filter(Expression value) {
    const auto filter_name = in_.name();
    const auto function = find_filter(filter_name);
    if (function == nullptr) in_.fail(fmt::format("the filter '{}' is not supported", filter_name));
    Call with;
    if (in_.accept("(")) with = call();
    return apply(function, std::move(value), std::move(with), false);
  }

  Expression test(Expression value) {
    const bool negated = in_.accept("not");
    const auto test_name = in_.name();
    const auto function = find_test(test_name);
    if (function == nullptr) in_.fail(fmt::format("the test '{}' is not supported", test_name));
    Call with;
    const auto& next = in_.peek();
    const bool operand = next.kind == TokenKind::string || next.kind == TokenKind::integer ||
                         (next.kind == TokenKind::name && next.text != "and" && next.text != "or" &&
                          next.text != "else" && next.text != "if" && next.text != "is" &&
                          next.text != "not" && next.text != "in") ||
                         in_.sees("[");
    if (in_.accept("(")) {
      with = call();
    } else if (operand) {
      with.values.push_back(primary());
    }
    return apply(function, std::move(value), std::move(with), negated);
  }

  static Expression apply(Builtin function, Expression value, Call with, bool negated) {
    return [=](State& state) {
      state.step();
      Arguments arguments;
      arguments.values.push_back(value(state));
      with.add_to(arguments, state);
      auto result = made(state, function(arguments));
      return negated ? Value(!result.truth()) : result;
    };
  }

  TokenReader& in_;
  int links_ = 0;
};

}  // namespace

Expression read_expression(TokenReader& in) { return ExpressionParser(in).expression(); }
Expression read_list(TokenReader& in) { return ExpressionParser(in).list_expression(); }
Expression read_operand(TokenReader& in) { return ExpressionParser(in).or_expression(); }

}  // namespace zero::jinja
