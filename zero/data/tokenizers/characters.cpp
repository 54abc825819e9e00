#include "zero/data/tokenizers/characters.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "zero/base/error.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Returns the length of the longest beginning of `bytes` that may begin a character, at least 1.
size_t broken_length(std::string_view bytes) {
  const auto at = [&](size_t i) { return i < bytes.size() ? static_cast<uint8_t>(bytes[i]) : 0; };
  const auto lead = at(0);
  const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                        : lead >= 0xE0 && lead <= 0xEF ? 3
                        : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                       : 1;
  // The second byte has a narrower range behind some first ones.
  const auto least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const auto most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (length == 1 || at(1) < least || at(1) > most) return 1;
  size_t good = 2;
  while (good < length && good < bytes.size() && continues(bytes[good])) ++good;
  return good;
}

}  // namespace

int32_t next_character(std::string_view text, size_t& at) {
  const auto first = static_cast<uint8_t>(text[at]);
  if (first < 0x80) {
    ++at;
    return first;
  }
  int32_t character = -1;
  const auto length = utf8proc_iterate(reinterpret_cast<const uint8_t*>(text.data()) + at,
                                       static_cast<utf8proc_ssize_t>(text.size() - at), &character);
  ensure(length > 0, "text that is UTF-8");
  at += static_cast<size_t>(length);
  return character;
}

int32_t previous_character(std::string_view text, size_t& end) {
  --end;
  while (end > 0 && continues(text[end])) --end;
  size_t at = end;
  return next_character(text, at);
}

void append(std::string& text, int32_t character) {
  uint8_t bytes[4];
  const auto length = utf8proc_encode_char(character, bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

bool is_white(int32_t c) {
  return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_punctuation(int32_t c) {
  if (c < 128) {
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
           (c >= 123 && c <= 126);
  }
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_word(int32_t c) {
  const auto category = utf8proc_category(c);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NO) ||
         category == UTF8PROC_CATEGORY_PC;
}

bool is_letter_or_number(int32_t c) {
  const auto category = utf8proc_category(c);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
         (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
}

bool is_control(int32_t c) {
  const auto category = utf8proc_category(c);
  return category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF ||
         category == UTF8PROC_CATEGORY_CO;
}

bool is_han(int32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

std::string normal_form(std::string text, NormalForm form) {
  if (is_ascii(text)) return text;
  const bool composed = form == NormalForm::nfc || form == NormalForm::nfkc;
  const bool compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const auto options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                       (compatible ? UTF8PROC_COMPAT : 0);
  uint8_t* mapped = nullptr;
  // utf8proc's options are flags, whose sums are no values of their own.
  // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange)
  const auto flags = static_cast<utf8proc_option_t>(options);
  const auto length = utf8proc_map(reinterpret_cast<const uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &mapped, flags);
  const std::unique_ptr<uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  if (length < 0) throw std::bad_alloc();  // the text is UTF-8, so nothing else can fail
  return {reinterpret_cast<const char*>(mapped), static_cast<size_t>(length)};
}

std::string lower_case(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const auto c = next_character(text, at);
    if (c == 0x130) {
      out += "i\xCC\x87";  // the one character that becomes two
    } else {
      append(out, utf8proc_tolower(c));
    }
  }
  return out;
}

std::string without_marks(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const auto c = next_character(text, at);
    if (utf8proc_category(c) != UTF8PROC_CATEGORY_MN) append(out, c);
  }
  return out;
}

std::string with_replacements(std::string_view bytes) {
  std::string out;
  while (true) {
    const size_t good = valid_utf8(bytes);
    out += bytes.substr(0, good);
    bytes.remove_prefix(good);
    if (bytes.empty()) return out;
    out += "\xEF\xBF\xBD";
    bytes.remove_prefix(broken_length(bytes));
  }
}

}  // namespace zero::tokenizers
