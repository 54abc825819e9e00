// Reads the tokens of a template one after the other.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/data/jinja/lexer.h"
#include "zero/data/jinja/state.h"

namespace zero::jinja {

class TokenReader {
 public:
  explicit TokenReader(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

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

  /// Guards the recursion of parsers.
  struct Depth {
    explicit Depth(TokenReader& reader) : depth(reader.depth_) {
      if (++depth > 150) reader.fail("the template nests too deeply");
    }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    ~Depth() { --depth; }
    int& depth;
  };

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace zero::jinja
