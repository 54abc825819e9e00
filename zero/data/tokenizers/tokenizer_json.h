// A tokenizer that Hugging Face's tokenizer.json describes.
//
// Note [Stages of a tokenizer.json]
// Added tokens that are not normalised are cut out of the text; the normaliser changes what is
// between them; added tokens that are normalised are cut out of that; the pre-tokenizer cuts the
// rest into words; the model writes each word in tokens; the post-processor puts special tokens
// around them. Truncation and padding that the file asks for belong to whoever makes batches, and
// are not done.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/data/tokenizers/added_tokens.h"
#include "zero/data/tokenizers/decoders.h"
#include "zero/data/tokenizers/normalizers.h"
#include "zero/data/tokenizers/pre_tokenizers.h"
#include "zero/data/tokenizers/vocabulary_model.h"

namespace zero::tokenizers {

/// Any number of threads may use it at once.
class TokenizerJson {
 public:
  /// Throws DataError, which names `source`, for text that is no tokenizer.json, and for a stage or
  /// an option that libzero does not compute.
  TokenizerJson(std::string_view json, std::string_view source);

  /// Returns the largest token, plus one.
  int64_t vocab_size() const { return static_cast<int64_t>(pieces_.size()); }
  /// Appends the tokens of `text`, with those that the post-processor adds where `special`. Throws
  /// DataError for text that is not UTF-8, or of 1 GiB and more.
  void encode(std::string_view text, bool special, Ids& tokens) const;
  /// Returns the text of tokens below vocab_size.
  std::string decode(const Ids& tokens, bool skip_special) const;
  /// Returns the token that is written so; an added one, or a piece.
  std::optional<uint32_t> id(std::string_view piece) const;
  /// Returns the token as the file writes it.
  const std::string& piece(uint32_t token) const { return pieces_[token]; }
  bool special(uint32_t token) const { return special_[token]; }
  std::optional<uint32_t> unknown_token() const { return model_->unknown_token(); }
  /// See Codec.
  std::optional<size_t> tokens_before_a_second_text() const {
    return pairs_ ? std::optional(before_.size()) : std::nullopt;
  }

 private:
  void add_tokens(const nlohmann::json& list);
  void set_post_processor(const nlohmann::json& json);
  void encode_part(const TextPart& part, WordCache& cache, Ids& tokens) const;
  WordCache take_cache() const;
  void give_back(WordCache cache) const;

  Normalizer normalize_;
  PreTokenizer cut_;
  std::unique_ptr<const VocabularyModel> model_;
  Decoder decode_;
  AddedTokens raw_;         // of text as it is
  AddedTokens normalized_;  // of normalised text
  Ids before_;              // what the post-processor adds
  Ids after_;
  bool pairs_ = false;               // a pair is the first text's tokens and those of the second,
                                     // without what stands before it
  std::vector<std::string> pieces_;  // by token
  std::vector<bool> known_;          // tokens may leave gaps
  std::vector<bool> special_;
  ByText<uint32_t> added_;
  mutable std::mutex mutex_;
  mutable std::vector<WordCache> caches_;  // not in use
};

}  // namespace zero::tokenizers
