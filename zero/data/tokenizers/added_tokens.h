// Tokens that are found in text as they are written, such as <|endoftext|>.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace zero::tokenizers {

struct AddedToken {
  std::string content;
  uint32_t id = 0;
  bool single_word = false;  ///< only where no letter or number is beside it
  bool strip_left = false;   ///< it swallows the white space before it
  bool strip_right = false;
  bool normalized = false;  ///< it is found in normalised text
  bool special = false;     ///< it is no text
};

/// A part of a text is a token that was found, or what is between two of them.
struct TextPart {
  std::string_view text;
  bool first = false;  ///< it begins where the whole text does
  int64_t token = -1;  ///< -1: text
};

/// Finds tokens in text: the leftmost, and of those the longest. Any number of threads may use it
/// at once.
class AddedTokens {
 public:
  void add(const AddedToken& token);
  std::vector<TextPart> cut(std::string_view text, bool first) const;

 private:
  struct Node {
    std::map<char, size_t> next;
    int64_t token = -1;  // the index of what ends here
  };
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{1};
};

}  // namespace zero::tokenizers
