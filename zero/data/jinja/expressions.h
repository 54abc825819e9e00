// The expressions of a template.
#pragma once

#include "zero/data/jinja/state.h"
#include "zero/data/jinja/token_reader.h"

namespace zero::jinja {

// Each reads as many tokens as belong to the expression. Throws Error, with the line, for what
// cannot be read or is not supported.

/// Reads an expression.
Expression read_expression(TokenReader& in);
/// Reads an expression, or several with commas, which are a list.
Expression read_list(TokenReader& in);
/// Reads an expression without an inline if.
Expression read_operand(TokenReader& in);

}  // namespace zero::jinja
