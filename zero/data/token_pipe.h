// Reads what the program zero-sentencepiece writes, and trusts none of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

/// Reads the table of a model's pieces, which has for each token a u32 length and the bytes that it
/// stands for. Throws DataError for a table without pieces or one that ends within a piece.
std::vector<std::string> parse_pieces(std::string_view table);

/// A stream of u32 tokens, cut anywhere by the pipe.
class TokenStream {
 public:
  /// Tokens are below `vocab_size`.
  explicit TokenStream(int64_t vocab_size) : vocab_size_(vocab_size) {}

  /// Takes the next bytes and hands on the tokens that are whole. Throws DataError for one outside
  /// of the vocabulary.
  void feed(std::string_view bytes, const std::function<void(std::span<const uint32_t>)>& tokens);
  /// Throws DataError when the stream ended within a token.
  void finish() const;

 private:
  int64_t vocab_size_;
  std::string pending_;
  std::vector<uint32_t> block_;
};

}  // namespace zero
