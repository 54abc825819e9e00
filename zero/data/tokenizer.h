// Turns text into tokens and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero {

namespace tokenizers {
class Codec;
}  // namespace tokenizers

/// Says whether the tokens that a tokenizer puts before and behind a text, such as <s> or [CLS],
/// are there.
enum class SpecialTokens : uint8_t { without, with };

/// Has tokens that are bytes, or those of a tokenizer.json of Hugging Face's or of a sentencepiece
/// model. Copies share what was loaded. Any number of threads may use it at once.
class Tokenizer {
 public:
  /// Returns a tokenizer of which each byte is a token.
  static Tokenizer bytes();
  /// Loads a tokenizer.json, a sentencepiece model's file (anything that does not end in .json),
  /// or a folder with tokenizer.json or tokenizer.model. Encoding with a sentencepiece model runs
  /// the program `zero-sentencepiece` (sentencepiece cannot share a process with LibTorch).
  /// DataError, which names the file, when it cannot be read, has a part that libzero does not
  /// compute, or the program is missing.
  static Tokenizer load(const std::filesystem::path& path);
  /// Trains a BPE model of `vocab_size` tokens on `text` (called until it gives an empty view) and
  /// writes it to `model`. Every UTF-8 text has an encoding that decodes to the same bytes, but
  /// that U+2581, sentencepiece's sign for a blank, becomes one. Throws DataError for
  /// sentencepiece's refusals, a vocabulary too large for the text among them.
  static void train(const std::function<std::string_view()>& text, int64_t vocab_size,
                    const std::filesystem::path& model);

  /// Returns the largest token, plus one.
  int64_t vocab_size() const;
  bool by_bytes() const;
  /// Returns the tokenizer.json or the sentencepiece model that was loaded; empty for bytes.
  const std::filesystem::path& file() const;

  /// Throws DataError for text that is not UTF-8, unless by bytes.
  std::vector<int64_t> encode(std::string_view text,
                              SpecialTokens special = SpecialTokens::without) const;
  /// Returns the tokens of two texts as one, with those that the tokenizer puts around them, and
  /// the place at which the second text's begin. Throws DataError where `encode` does, and for a
  /// tokenizer that does not put two texts one behind the other as a BERT's does (a sentence whose
  /// subject is the text).
  std::pair<std::vector<int64_t>, size_t> encode_pair(std::string_view first,
                                                      std::string_view second) const;
  /// Encodes text that comes piece by piece, cut anywhere, into the tokens that the whole text has,
  /// which go piece by piece; `text` may run on a thread of its own. A tokenizer.json's are made on
  /// several threads.
  void encode(const std::function<std::string_view()>& text,
              const std::function<void(std::span<const uint32_t>)>& tokens) const;
  /// Returns true where a text's pieces, joined, are the text: bytes and sentencepiece models.
  bool pieces_are_text() const;
  /// Returns the bytes that a token of the vocabulary stands for; of a tokenizer.json, as the file
  /// writes it.
  const std::string& piece(uint32_t token) const;
  /// Returns the text of `tokens`: UTF-8 for a tokenizer.json, which puts U+FFFD for what is none;
  /// else bytes, which need not be whole characters. Throws DataError for a token outside of the
  /// vocabulary.
  std::string decode(std::span<const int64_t> tokens,
                     SpecialTokens special = SpecialTokens::with) const;
  /// Returns the token that a tokenizer.json writes as `piece`, such as "<|endoftext|>".
  std::optional<int64_t> token(std::string_view piece) const;
  /// Returns the tokens that a tokenizer.json calls special, in order.
  std::vector<int64_t> special_tokens() const;
  /// Returns the token that stands for what has no other.
  std::optional<int64_t> unknown_token() const;

 private:
  explicit Tokenizer(std::shared_ptr<const tokenizers::Codec> codec) : codec_(std::move(codec)) {}

  std::shared_ptr<const tokenizers::Codec> codec_;
};

}  // namespace zero
