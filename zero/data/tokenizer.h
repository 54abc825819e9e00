// Text to tokens and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

/// Either bytes, or a sentencepiece model. Decoding is a table look-up; encoding with a model runs
/// the program `zero-sentencepiece` (sentencepiece cannot share a process with LibTorch).
class Tokenizer {
 public:
  /// Each byte is a token.
  static Tokenizer bytes();
  /// A sentencepiece model's file. DataError when it cannot be read or the program is missing.
  static Tokenizer load(const std::filesystem::path& model);
  /// Trains a BPE model of `vocab_size` tokens on `text` (called until it gives an empty view) and
  /// writes it to `model`. Every UTF-8 text has an encoding that decodes to the same bytes, but
  /// that U+2581, sentencepiece's sign for a blank, becomes one. DataError for sentencepiece's
  /// refusals, a vocabulary too large for the text among them.
  static void train(const std::function<std::string_view()>& text, int64_t vocab_size,
                    const std::filesystem::path& model);

  int64_t vocab_size() const { return static_cast<int64_t>(pieces_.size()); }
  bool by_bytes() const { return model_.empty(); }

  std::vector<int64_t> encode(std::string_view text) const;
  /// Encodes text that comes piece by piece into tokens that go piece by piece; `text` runs on a
  /// thread of its own.
  void encode(const std::function<std::string_view()>& text,
              const std::function<void(std::span<const uint32_t>)>& tokens) const;
  /// The bytes that a token of the vocabulary stands for.
  const std::string& piece(uint32_t token) const { return pieces_[token]; }
  /// The text of `tokens`: bytes, which need not be whole UTF-8 characters. DataError for a token
  /// outside of the vocabulary.
  std::string decode(std::span<const int64_t> tokens) const;

 private:
  std::filesystem::path model_;
  std::vector<std::string> pieces_;
};

}  // namespace zero
