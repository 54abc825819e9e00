// A rendering under way, and what the parts of a template do with it.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/data/jinja/template.h"
#include "zero/data/jinja/value.h"

namespace zero::jinja {

/// A rendering has variables by scope, and the text so far.
class State {
 public:
  explicit State(Dict globals) : scopes_{std::move(globals)} {}

  Value look_up(const std::string& name) {
    for (size_t i = scopes_.size(); i > 0; --i) {
      if (i > 1 && i <= hidden_end_) i = 1;  // a macro sees its own scopes and the outermost
      work.spend(scopes_[i - 1].size());
      for (const auto& [key, value] : scopes_[i - 1]) {
        if (key == name) return value;
      }
    }
    return Undefined{name};
  }
  void set(const std::string& name, Value value) { put(scopes_.back(), name, std::move(value)); }

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
  void step() { work.spend(256); }
  void write(std::string_view text) {
    work.spend(16 + text.size());
    rendered.text += text;
  }
  /// Runs `body`, which recurses `levels` deep beside what calls this again.
  template <typename Body>
  auto nested(int levels, const Body& body) {
    struct Guard {
      int& nesting;
      int levels;
      ~Guard() { nesting -= levels; }
    } const guard{nesting_ += levels, levels};
    if (nesting_ > kMostLevels) throw Fault("the template nests too deeply");
    return body();
  }

  Work work;
  Rendered rendered;
  enum class Jump : unsigned char { none, broken, continued } jump = Jump::none;

 private:
  static constexpr int kMostDepth = 60;
  static constexpr int kMostLevels = 2500;

  std::vector<Dict> scopes_;
  size_t hidden_end_ = 0;  // scopes [1, hidden_end_) are not seen
  int depth_ = 0;
  int nesting_ = 0;
};

/// An expression's value costs work, whatever makes it.
class Expression {
 public:
  Expression() = default;
  template <typename Body>
  requires std::is_invocable_r_v<Value, const Body&, State&> Expression(Body body)
      : body_(std::move(body)) {}

  Value operator()(State& state) const {
    return state.nested(1, [&] {
      auto value = body_(state);
      const auto* text = value.string();
      state.work.spend(16 + (text == nullptr ? 0 : text->size()));
      return value;
    });
  }

 private:
  std::function<Value(State&)> body_;
};

using Statement = std::function<void(State&)>;

/// An error with a line, which is not given another one.
class Located : public Error {
  using Error::Error;
};

/// Runs `body`, whose faults get the line.
template <typename Body>
auto at_line(size_t line, const Body& body) {
  try {
    return body();
  } catch (const Fault& fault) {
    throw Located(fmt::format("line {}: {}", line, fault.what()));
  }
}

}  // namespace zero::jinja
