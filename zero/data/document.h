// Documents of JSON lines as tokens, with marks that say what is learned.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "zero/data/example.h"
#include "zero/data/token_file.h"
#include "zero/data/tokenizer.h"

namespace zero {

struct Document {
  std::vector<int64_t> tokens;
  std::vector<uint8_t> marks;  ///< of each token: Note [Marks of tokens] in token_file.h
  Label label{};               ///< of a text that is classified
  /// No special token ends the text, and no template wrote it: an answer does not teach its end.
  bool ends_open = false;
};

/// Any number of threads may use it at once.
class DocumentEncoder {
 public:
  /// `tokenizer` is borrowed. Its chat template and its end of a text (eos_token, or else the
  /// eos_token_id of config.json) are read in the folder of its file. Throws DataError for a
  /// template that cannot be read, and for an end that is no token.
  explicit DocumentEncoder(const Tokenizer& tokenizer);

  /// See read_example.
  Example read(std::string_view line) const { return read_example(line, chat_template_); }
  /// A text that no template wrote has the tokens that the tokenizer puts around it, and ends with
  /// its end of a text where it has one. The first token is never supervised. Throws DataError for
  /// an example without tokens.
  Document encode(const Example& example) const;
  /// The text, or both, with the tokens that the tokenizer puts around them; none is supervised.
  /// DataError as Tokenizer::encode_pair.
  Document encode(const LabelledText& text) const;

  /// Returns the token that ends a text.
  std::optional<int64_t> end() const { return end_; }

 private:
  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> chat_template_;
  std::optional<int64_t> end_;
  std::set<int64_t> special_;
};

}  // namespace zero
