#include "zero/data/tokenizers/vocabulary_model.h"

#include <fmt/format.h>

#include "zero/data/tokenizers/byte_pairs.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/tokenizers/word_piece.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

// This is far above every vocabulary. There is a table of all tokens, which must not grow without
// limit.
constexpr uint64_t kMostTokens = uint64_t{1} << 24;

}  // namespace

VocabularyModel::VocabularyModel(const nlohmann::json& model) {
  const auto& vocabulary = member(model, "vocab");
  if (!vocabulary.is_object()) throw Error("has no object 'vocab'");
  vocabulary_.reserve(vocabulary.size());
  for (const auto& [piece, token] : vocabulary.items()) {
    if (!token.is_number_unsigned() || token.get<uint64_t>() >= kMostTokens) {
      throw Error(fmt::format("has the token {} for the piece {}", excerpt(token.dump()),
                              in_quotes(excerpt(piece))));
    }
    vocabulary_.emplace(piece, token.get<uint32_t>());
  }
}

std::optional<uint32_t> VocabularyModel::find(std::string_view piece) const {
  const auto found = vocabulary_.find(piece);
  return found == vocabulary_.end() ? std::nullopt : std::optional(found->second);
}

std::unique_ptr<const VocabularyModel> make_vocabulary_model(const nlohmann::json& json) {
  // Old files do not name the type.
  const auto usual = [&]() -> std::string {
    if (json.contains("merges")) return "BPE";
    if (json.contains("max_input_chars_per_word")) return "WordPiece";
    return json.contains("vocab") && json["vocab"].is_array() ? "Unigram" : "";
  };
  const auto type = optional_member<std::string>(json, "type", usual());
  if (type == "BPE") return std::make_unique<BytePairs>(json);
  if (type == "WordPiece") return std::make_unique<WordPiece>(json);
  unknown("model", type);
}

}  // namespace zero::tokenizers
