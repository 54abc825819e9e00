// A rendering under way, and what the parts of a template do with it.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
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

using Expression = std::function<Value(State&)>;
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
