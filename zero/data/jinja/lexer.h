// Cuts a template into text and the tokens of its tags.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace zero::jinja {

enum class TokenKind : unsigned char {
  text,         ///< between tags
  begin_block,  ///< {%
  begin_print,  ///< {{
  end_tag,      ///< %} or }}
  name,
  string,
  integer,
  number,
  sign,  ///< an operator or a bracket
  end    ///< of the template
};

struct Token {
  TokenKind kind = TokenKind::end;
  std::string text;
  size_t line = 1;
};

/// The white space around tags is that of Hugging Face's templates: trim_blocks and lstrip_blocks.
/// Throws Error, with the line, for a tag or a string that does not end.
std::vector<Token> tokens_of(std::string_view text);

}  // namespace zero::jinja
