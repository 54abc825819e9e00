#include "zero/data/tokenizers/word_piece.h"

#include <fmt/format.h>

#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {

WordPiece::WordPiece(const nlohmann::json& model)
    : VocabularyModel(model),
      prefix_(optional_member<std::string>(model, "continuing_subword_prefix", "##")),
      longest_(optional_member<uint64_t>(model, "max_input_chars_per_word", 100)) {
  const auto text = optional_member<std::string>(model, "unk_token", "[UNK]");
  const auto token = find(text);
  if (!token)
    throw Error(fmt::format("has the unk_token {}, which its vocabulary lacks", in_quotes(text)));
  unknown_ = *token;
}

void WordPiece::encode(std::string_view word, WordCache& /*cache*/, Ids& tokens) const {
  std::vector<size_t> ends;  // of its characters
  for (size_t at = 0; at < word.size();) {
    next_character(word, at);
    ends.push_back(at);
    if (ends.size() > longest_) return tokens.push_back(unknown_);
  }
  const size_t before = tokens.size();
  std::string piece;
  for (size_t first = 0; first < ends.size();) {
    const size_t begin = first == 0 ? 0 : ends[first - 1];
    piece = first == 0 ? "" : prefix_;
    piece += word.substr(begin);
    size_t last = ends.size();
    std::optional<uint32_t> token;
    while (last > first && !(token = find(piece))) {
      --last;
      if (last > first) piece.resize(piece.size() - (ends[last] - ends[last - 1]));
    }
    if (!token) {  // the whole word is unknown
      tokens.resize(before);
      return tokens.push_back(unknown_);
    }
    tokens.push_back(*token);
    first = last;
  }
}

}  // namespace zero::tokenizers
