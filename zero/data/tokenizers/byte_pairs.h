// Byte-pair encoding (Sennrich et al., arXiv 1508.07909) joins pairs of pieces in the order of
// their ranks.
#pragma once

#include <array>

#include "zero/data/tokenizers/vocabulary_model.h"

namespace zero::tokenizers {

class BytePairs final : public VocabularyModel {
 public:
  /// Throws Error as make_vocabulary_model.
  explicit BytePairs(const nlohmann::json& model);
  void encode(std::string_view word, WordCache& cache, Ids& tokens) const override;
  std::optional<uint32_t> unknown_token() const override { return unknown_; }

 private:
  struct Merge {
    uint32_t rank;
    uint32_t token;
  };

  void add_merge(const nlohmann::json& merge, uint32_t rank);
  const Merge* merge_of(uint32_t left, uint32_t right) const;
  Ids characters_of(std::string_view word) const;
  Ids merged(Ids tokens) const;

  std::unordered_map<uint64_t, Merge> merges_;  // by both tokens
  bool ignore_merges_;                          // for a word that is a piece
  bool fuse_unknown_;
  std::optional<uint32_t> unknown_;
  std::array<std::optional<uint32_t>, 256>
      bytes_{};  // by which a character without a piece is told
};

}  // namespace zero::tokenizers
