#include "zero/data/tokenizers/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <array>

#include "zero/base/error.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/tokenizers/unicode_ranges.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

// These are the characters of White_Space. PCRE2's \s has U+180E besides.
constexpr std::string_view kWhite =
    "\\x09-\\x0D\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}"
    "\\x{3000}";

std::string pcre2_message(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Rewrites a pattern of Oniguruma's for PCRE2, and refuses what would mean something else.
std::string translate(std::string_view pattern) {
  const auto refuse = [&](std::string_view what) {
    throw Error(fmt::format("has the pattern {}, in which libzero does not compute {}",
                            in_quotes(pattern), what));
  };
  std::string out;
  bool in_class = false;
  // Adds a set, given as what stands between brackets.
  const auto add_set = [&](std::string_view set, bool negated) {
    if (in_class) {
      if (negated) refuse("a negated class within brackets");
      out += set;
    } else {
      out += fmt::format("[{}{}]", negated ? "^" : "", set);
    }
  };
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '\\') {
      ++i;
      if (next == 's' || next == 'S') {
        if (in_class && next == 'S') {
          out += "\\S";
        } else {
          add_set(kWhite, next == 'S');
        }
      } else if (next == 'p' || next == 'P') {
        const auto end = pattern.find('}', i);
        if (i + 1 >= pattern.size() || pattern[i + 1] != '{' || end == std::string_view::npos)
          refuse("a class that is not in braces");
        const auto name = pattern.substr(i + 2, end - i - 2);
        const auto ranges = unicode_ranges(name);
        if (ranges.empty()) {
          out += fmt::format("\\{}{{{}}}", next, name);
        } else {
          add_set(ranges, next == 'P');
        }
        i = end;
      } else if (next == '\0' || (std::isalnum(static_cast<unsigned char>(next)) != 0 &&
                                  std::string_view("rntfvdDx").find(next) == std::string::npos)) {
        refuse(fmt::format("\\{}", next));
      } else {
        out += {c, next};
      }
      continue;
    }
    if (in_class && (c == '[' || (c == '&' && next == '&'))) refuse("brackets within brackets");
    if (c == '}' && next == '+') refuse("}+");
    if (c == '[' && !in_class) {
      in_class = true;
      out += c;
      if (next == '^') out += pattern[++i];
      // A bracket that comes first would be a member of the class.
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') refuse("an empty class");
      continue;
    }
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

}  // namespace

Regex::Regex(std::string_view pattern) {
  const auto translated = translate(pattern);
  int error = 0;
  PCRE2_SIZE at = 0;
  auto* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                             &error, &at, nullptr);
  if (code == nullptr) {
    throw Error(fmt::format("has the pattern {}, which cannot be read: {}", in_quotes(pattern),
                            pcre2_message(error)));
  }
  code_ = {code, [](pcre2_code* owned) { pcre2_code_free(owned); }};
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without it matches are slower
}

void Regex::each(std::string_view text, const OnMatch& on_match) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create(1, nullptr), &pcre2_match_data_free);
  if (data == nullptr) throw std::bad_alloc();
  const auto match = [&](size_t at, uint32_t options) {
    return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                       PCRE2_NO_UTF_CHECK | options, data.get(), nullptr);
  };
  for (size_t at = 0; at < text.size();) {
    int result = match(at, 0);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(at, PCRE2_NO_JIT);
    if (result == PCRE2_ERROR_NOMATCH) return;
    if (result < 0) {
      throw DataError(fmt::format(
          "A pattern of the tokenizer fails on this text at its byte {}: {}. Use another text.", at,
          pcre2_message(result)));
    }
    const auto* ends = pcre2_get_ovector_pointer(data.get());
    if (ends[1] > ends[0]) on_match(ends[0], ends[1]);
    at = ends[1];
    if (ends[1] > ends[0] || at >= text.size()) continue;
    do ++at;  // behind an empty match, by a whole character
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  }
}

Pattern::Pattern(const nlohmann::json& json) {
  if (!member(json, "Regex").is_null()) {
    regex_ = std::make_shared<Regex>(required<std::string>(json, "Regex"));
  } else {
    text_ = required<std::string>(json, "String");
  }
}

void Pattern::each(std::string_view text, const OnMatch& on_match) const {
  if (regex_ != nullptr) return regex_->each(text, on_match);
  if (text_.empty()) return;
  for (size_t at = text.find(text_); at != std::string_view::npos;
       at = text.find(text_, at + text_.size()))
    on_match(at, at + text_.size());
}

}  // namespace zero::tokenizers
