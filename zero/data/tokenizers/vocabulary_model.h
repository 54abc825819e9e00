// The third stage of a tokenizer turns words into tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace zero::tokenizers {

using Ids = std::vector<uint32_t>;

struct HashOfText {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <typename Value>
using ByText = std::unordered_map<std::string, Value, HashOfText, std::equal_to<>>;

/// The tokens of words that were met before. It belongs to one thread at a time.
using WordCache = ByText<Ids>;

/// A vocabulary, and a rule that writes a word in its pieces. Any number of threads may use it at
/// once.
class VocabularyModel {
 public:
  virtual ~VocabularyModel() = default;
  /// Appends the tokens of `word`.
  virtual void encode(std::string_view word, WordCache& cache, Ids& tokens) const = 0;
  /// Returns the token that stands for what has no piece.
  virtual std::optional<uint32_t> unknown_token() const = 0;

  const ByText<uint32_t>& vocabulary() const { return vocabulary_; }

 protected:
  /// Throws Error for a vocabulary that is no object of tokens below 2^24.
  explicit VocabularyModel(const nlohmann::json& model);
  std::optional<uint32_t> find(std::string_view piece) const;

 private:
  ByText<uint32_t> vocabulary_;
};

/// Makes the model that `json` describes: BPE or WordPiece. Throws Error for another one, and for a
/// variant that is not computed.
std::unique_ptr<const VocabularyModel> make_vocabulary_model(const nlohmann::json& json);

}  // namespace zero::tokenizers
