// WordPiece (Schuster and Nakajima, 2012), as BERT has it: the longest pieces from the left.
#pragma once

#include "zero/data/tokenizers/vocabulary_model.h"

namespace zero::tokenizers {

class WordPiece final : public VocabularyModel {
 public:
  /// Throws Error as make_vocabulary_model.
  explicit WordPiece(const nlohmann::json& model);
  void encode(std::string_view word, WordCache& cache, Ids& tokens) const override;
  std::optional<uint32_t> unknown_token() const override { return unknown_; }

 private:
  std::string prefix_;  // of pieces that continue a word
  uint32_t unknown_ = 0;
  uint64_t longest_;  // word, in characters
};

}  // namespace zero::tokenizers
