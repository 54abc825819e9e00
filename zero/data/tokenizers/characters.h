// Characters of UTF-8 text, as tokenizers need them: classes, lower case and normal forms, by the
// library utf8proc. Text must be valid UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zero::tokenizers {

/// Returns the character at `at`, and moves `at` behind it.
int32_t next_character(std::string_view text, size_t& at);
/// Returns the character that ends at `end`, and moves `end` to its beginning.
int32_t previous_character(std::string_view text, size_t& end);
void append(std::string& text, int32_t character);

/// Returns whether a character is one of the 25 of White_Space.
bool is_white(int32_t character);
/// Punctuation as BERT has it: all of ASCII's signs, and Unicode's category P.
bool is_punctuation(int32_t character);
/// Letters, marks, numbers and connecting punctuation.
bool is_word(int32_t character);
bool is_letter_or_number(int32_t character);
/// Control characters, formats and private use.
bool is_control(int32_t character);
/// Han characters, in the ranges that BERT's tokenizer names.
bool is_han(int32_t character);

enum class NormalForm : uint8_t { nfc, nfd, nfkc, nfkd };
std::string normal_form(std::string text, NormalForm form);
/// Returns lower case, character by character: a sigma at the end of a word is like any other.
std::string lower_case(std::string_view text);
/// Drops the marks of category Mn.
std::string without_marks(std::string_view text);

/// Replaces what is not UTF-8 by U+FFFD: each longest beginning of a character, or each byte.
std::string with_replacements(std::string_view bytes);

}  // namespace zero::tokenizers
