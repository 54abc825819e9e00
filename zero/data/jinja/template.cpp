#include "zero/data/jinja/template.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "zero/data/jinja/builtins.h"
#include "zero/data/jinja/expressions.h"
#include "zero/data/jinja/lexer.h"
#include "zero/data/jinja/state.h"
#include "zero/data/jinja/token_reader.h"

namespace zero::jinja {

namespace {

// Reads statements.
class Parser : TokenReader {
 public:
  using TokenReader::TokenReader;

  Statement read() {
    auto body = block({});
    return body;
  }
  bool marks_generation() const { return marks_generation_; }

 private:
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
        all.emplace_back([text = take().text](State& state) { state.write(text); });
      } else if (token.kind == TokenKind::begin_print) {
        const size_t line = take().line;
        auto value = read_list(*this);
        expect_end();
        all.emplace_back([value = std::move(value), line](State& state) {
          at_line(line, [&] { state.write(value(state).text()); });
        });
      } else {
        take();
        if (std::find(ends.begin(), ends.end(), peek().text) != ends.end()) break;
        all.push_back(statement());
      }
    }
    return [all = std::move(all)](State& state) {
      state.nested(8, [&] {
        for (const auto& each : all) {
          each(state);
          if (state.jump != State::Jump::none) return;
        }
      });
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
      auto condition = read_expression(*this);
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
    auto source = read_operand(*this);
    std::optional<Expression> condition;
    if (accept("if")) condition = read_expression(*this);
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
      auto all = at_line(line, [&] {
        const auto value = source(state);
        state.work.spend(value.extent().own);
        auto elements = value.elements();
        state.work.spend(elements.size() * sizeof(Value));
        return elements;
      });
      if (condition) {
        List kept;
        for (const auto& each : all) {
          state.in_scope([&] {
            at_line(line, [&] {
              state.step();
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
      if (!space.changes()) throw Fault(fmt::format("'{}' is no namespace", targets[0]));
      state.work.spend(space.dict()->size() * sizeof(Value));
      space.set_member(member, std::move(value));
    };
    if (accept("=")) {
      auto value = read_list(*this);
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
      if (accept("=")) otherwise = read_expression(*this);
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
  for (const auto& [name, value] : variables) put(globals, name, value);
  State state(std::move(globals));
  body_(state);
  return std::move(state.rendered);
}

}  // namespace zero::jinja
