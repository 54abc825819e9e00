#include "zero/data/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "zero/data/jinja/value.h"
#include "zero/data/tokenizers/characters.h"

namespace zero::jinja {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

class Lexer {
 public:
  explicit Lexer(std::string_view text) {
    for (size_t i = 0; i < text.size(); ++i) {
      const bool before_newline = i + 1 < text.size() && text[i + 1] == '\n';
      if (text[i] == '\r' && before_newline) continue;
      text_ += text[i];
    }
    if (text_.ends_with('\n')) text_.pop_back();
  }

  std::vector<Token> read() {
    while (at_ < text_.size()) {
      const size_t tag = next_tag();
      const char kind = tag < text_.size() ? text_[tag + 1] : '\0';
      const char sign = tag + 2 < text_.size() ? text_[tag + 2] : '\0';
      add_text(text_.substr(at_, tag - at_), kind, sign);
      at_ = tag;
      if (kind == '\0') break;
      at_ += sign == '-' || (sign == '+' && kind != '{') ? 3 : 2;
      if (kind == '#') {
        read_comment();
      } else {
        read_tag(kind == '{');
      }
    }
    add(TokenKind::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw Error(fmt::format("line {}: {}", line_, what));
  }

  size_t next_tag() const {
    for (size_t at = text_.find('{', at_); at != std::string::npos; at = text_.find('{', at + 1)) {
      if (at + 1 < text_.size() && std::string_view("{%#").find(text_[at + 1]) != std::string::npos)
        return at;
    }
    return text_.size();
  }

  void add(TokenKind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }

  // Adds the text before a tag of that kind and sign.
  void add_text(std::string text, char kind, char sign) {
    const size_t lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
    if (strip_all_) {
      size_t begin = 0;
      for (size_t at = 0; begin < text.size() && white(text, at); begin = at) {
      }
      text.erase(0, begin);
    } else if (strip_line_ && text.starts_with('\n')) {
      text.erase(0, 1);
    }
    const bool whole_start = at_ == 0 || lines > 0;
    if (sign == '-') {
      while (!text.empty()) {
        size_t end = text.size();
        if (!tokenizers::is_white(tokenizers::previous_character(text, end))) break;
        text.resize(end);
      }
    } else if ((kind == '%' || kind == '#') && sign != '+') {
      const auto last = text.find_last_not_of(" \t");
      // Only where the tag is the first of its line.
      const bool first = last == std::string::npos ? whole_start : text[last] == '\n';
      if (first) text.resize(last == std::string::npos ? 0 : last + 1);
    }
    strip_all_ = strip_line_ = false;
    if (!text.empty()) add(TokenKind::text, std::move(text));
    line_ += lines;
  }

  static bool white(std::string_view text, size_t& at) {
    return tokenizers::is_white(tokenizers::next_character(text, at));
  }

  // Behind the end of a tag, at `close`.
  void end(size_t close, bool block) {
    const char sign = close > 0 ? text_[close - 1] : '\0';
    strip_all_ = sign == '-';
    strip_line_ = block && sign != '+';
    at_ = close + 2;
  }

  void read_comment() {
    const size_t close = text_.find("#}", at_);
    if (close == std::string::npos) fail("a comment does not end");
    line_ +=
        static_cast<size_t>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                       text_.begin() + static_cast<std::ptrdiff_t>(close), '\n'));
    end(close, true);
  }

  void read_tag(bool print) {
    add(print ? TokenKind::begin_print : TokenKind::begin_block, "");
    const std::string_view close = print ? "}}" : "%}";
    int depth = 0;  // of brackets: in a dict the ends may look like that of the tag
    while (true) {
      while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0)
        line_ += text_[at_++] == '\n' ? 1 : 0;
      if (at_ >= text_.size()) fail("a tag does not end");
      const auto rest = std::string_view(text_).substr(at_);
      const bool sign = rest[0] == '-' || (rest[0] == '+' && !print);
      if (depth == 0 && (rest.starts_with(close) || (sign && rest.substr(1).starts_with(close)))) {
        add(TokenKind::end_tag, "");
        return end(at_ + (rest.starts_with(close) ? 0 : 1), !print);
      }
      read_token(rest, depth);
    }
  }

  // Returns the length of an exponent such as e-3 at a place; 0 if there is none.
  static size_t exponent_at(std::string_view rest, size_t at) {
    size_t end = at;
    if (end == rest.size() || (rest[end] != 'e' && rest[end] != 'E')) return 0;
    ++end;
    if (end < rest.size() && (rest[end] == '+' || rest[end] == '-')) ++end;
    const size_t digits = end;
    while (end < rest.size() && is_digit(rest[end])) ++end;
    return end > digits ? end - at : 0;
  }

  void read_token(std::string_view rest, int& depth) {
    const char c = rest[0];
    if (c == '"' || c == '\'') return read_string(c);
    if (is_digit(c)) {
      size_t size = 1;
      while (size < rest.size() && is_digit(rest[size])) ++size;
      auto kind = TokenKind::integer;
      if (size + 1 < rest.size() && rest[size] == '.' && is_digit(rest[size + 1])) {
        kind = TokenKind::number;
        for (++size; size < rest.size() && is_digit(rest[size]);) ++size;
      }
      if (const size_t exponent = exponent_at(rest, size); exponent > 0) {
        kind = TokenKind::number;
        size += exponent;
      }
      add(kind, std::string(rest.substr(0, size)));
      at_ += size;
      return;
    }
    if (is_name(c)) {
      size_t size = 1;
      while (size < rest.size() && is_name(rest[size])) ++size;
      add(TokenKind::name, std::string(rest.substr(0, size)));
      at_ += size;
      return;
    }
    for (const std::string_view sign : {"==", "!=", "<=", ">=", "//", "**"}) {
      if (!rest.starts_with(sign)) continue;
      add(TokenKind::sign, std::string(sign));
      at_ += 2;
      return;
    }
    if (std::string_view("+-*/%~<>=()[]{}.,:|").find(c) == std::string_view::npos)
      fail(fmt::format("'{}' has no meaning in a tag", c));
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    add(TokenKind::sign, std::string(1, c));
    ++at_;
  }

  void read_string(char quote) {
    std::string out;
    const size_t first = line_;
    for (++at_; at_ < text_.size() && text_[at_] != quote; ++at_) {
      char c = text_[at_];
      line_ += c == '\n' ? 1 : 0;
      if (c == '\\' && at_ + 1 < text_.size()) {
        c = text_[++at_];
        if (c == 'u' || c == 'x' || c == 'U' || is_digit(c))
          fail(fmt::format("the escape \\{} in a string is not supported", c));
        constexpr std::string_view kEscapes = "nrtfvab";
        constexpr std::string_view kMeant = "\n\r\t\f\v\a\b";
        if (const auto known = kEscapes.find(c); known != std::string_view::npos) {
          c = kMeant[known];
        } else if (c != '\\' && c != '\'' && c != '"' && c != '\n') {
          out += '\\';
        }
      }
      out += c;
    }
    if (at_ >= text_.size()) {
      line_ = first;
      fail("a string does not end");
    }
    ++at_;
    add(TokenKind::string, std::move(out));
  }

  std::string text_;
  size_t at_ = 0;
  size_t line_ = 1;
  bool strip_all_ = false;   // white space behind the last tag
  bool strip_line_ = false;  // the line end behind it
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view text) { return Lexer(text).read(); }

}  // namespace zero::jinja
