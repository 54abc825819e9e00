#include "zero/data/token_pipe.h"

#include <fmt/format.h>

#include <cstring>

#include "zero/base/error.h"

namespace zero {

std::vector<std::string> parse_pieces(std::string_view table) {
  std::vector<std::string> pieces;
  while (!table.empty()) {
    uint32_t length = 0;
    if (table.size() >= sizeof length) std::memcpy(&length, table.data(), sizeof length);
    if (table.size() < sizeof length || table.size() - sizeof length < length) {
      throw DataError(fmt::format(
          "The tokenizer's table of pieces ends within piece {}: the program that gives it failed.",
          pieces.size()));
    }
    pieces.emplace_back(table.substr(sizeof length, length));
    table.remove_prefix(sizeof length + length);
  }
  if (pieces.empty()) throw DataError("The tokenizer's table of pieces is empty.");
  return pieces;
}

void TokenStream::feed(std::string_view bytes,
                       const std::function<void(std::span<const uint32_t>)>& tokens) {
  pending_ += bytes;
  block_.resize(pending_.size() / sizeof(uint32_t));
  if (block_.empty()) return;
  std::memcpy(block_.data(), pending_.data(), block_.size() * sizeof(uint32_t));
  pending_.erase(0, block_.size() * sizeof(uint32_t));
  for (const auto token : block_) {
    if (token >= vocab_size_) {
      throw DataError(fmt::format("The tokenizer gave the token {}, and its vocabulary has {}.",
                                  token, vocab_size_));
    }
  }
  tokens(block_);
}

void TokenStream::finish() const {
  if (!pending_.empty())
    throw DataError(
        "The tokenizer's output ends within a token: the program that gives it failed.");
}

}  // namespace zero
