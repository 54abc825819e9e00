// Templates in the part of Jinja's language that chat templates use.
//
// Note [A part of Jinja]
// if, elif, else; for with a condition, else, break and continue, loop.index and its relatives; set
// of a name, of several, of a namespace's member, and of a block; macro with defaults; generation
// (Hugging Face's mark of what a model says). Expressions have Python's operators, slices, inline
// if, lists, dicts, calls, filters and tests; builtins.cpp lists those. Everything else is refused
// with its name and line, when the template is read.
//
// Note [Templates of strangers]
// A template comes with a model's folder, so it must not crash, run for ever or fill the memory.
// Values have bounded bytes and depth (value.h). Only a namespace changes, and nothing can hold one
// but a variable, so that no value holds itself. Each expression, piece of text and element that is
// made spends of the rendering's Work, which bounds its time and its memory. The parser bounds how
// deeply expressions and statements nest, and State::nested how deeply they run within macros.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/data/jinja/value.h"

namespace zero::jinja {

class State;

struct Rendered {
  std::string text;
  /// Begins and ends of what {% generation %} marks, in bytes of the text.
  std::vector<std::pair<size_t, size_t>> generated;
};

/// Any number of threads may use it at once.
class Template {
 public:
  /// Throws Error, with the line, for what cannot be read or is not supported.
  explicit Template(std::string_view text);

  /// Throws Error, with the line, where the template fails, or says so (raise_exception).
  Rendered render(const Dict& variables) const;
  /// Returns whether the template has {% generation %}.
  bool marks_generation() const { return marks_generation_; }

 private:
  std::function<void(State&)> body_;
  bool marks_generation_ = false;
};

}  // namespace zero::jinja
