#include "zero/data/tokenizer.h"

#include <fmt/format.h>

#include <system_error>

#include "zero/base/error.h"
#include "zero/data/tokenizers/codec.h"

namespace zero {

namespace fs = std::filesystem;

Tokenizer Tokenizer::bytes() { return Tokenizer(tokenizers::byte_codec()); }

Tokenizer Tokenizer::load(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
      if (fs::exists(path / name, error)) return load(path / name);
    }
    throw DataError(
        fmt::format("The folder {} has neither a tokenizer.json nor a tokenizer.model. Give the "
                    "folder of a model with its tokenizer.",
                    path.string()));
  }
  if (!fs::exists(path, error)) {
    throw DataError(
        fmt::format("The tokenizer {} does not exist. Give a tokenizer.json, the file of a "
                    "sentencepiece model, "
                    "or a folder with one.",
                    path.string()));
  }
  return Tokenizer(path.extension() == ".json" ? tokenizers::json_codec(path)
                                               : tokenizers::sentencepiece_codec(path));
}

void Tokenizer::train(const std::function<std::string_view()>& text, int64_t vocab_size,
                      const fs::path& model) {
  tokenizers::train_sentencepiece(text, vocab_size, model);
}

int64_t Tokenizer::vocab_size() const { return codec_->vocab_size(); }
bool Tokenizer::by_bytes() const { return codec_->file().empty(); }
const fs::path& Tokenizer::file() const { return codec_->file(); }
bool Tokenizer::pieces_are_text() const { return codec_->pieces_are_text(); }
const std::string& Tokenizer::piece(uint32_t token) const { return codec_->piece(token); }

std::vector<int64_t> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  std::vector<uint32_t> tokens;
  codec_->encode(text, special, tokens);
  return {tokens.begin(), tokens.end()};
}

std::pair<std::vector<int64_t>, size_t> Tokenizer::encode_pair(std::string_view first,
                                                               std::string_view second) const {
  const auto begin = codec_->tokens_before_a_second_text();
  if (!begin) {
    throw DataError(fmt::format(
        "has a text_pair, and the tokenizer {} does not say that two texts stand one behind the "
        "other, each with its end, as a BERT's does",
        file().filename().string()));
  }
  auto tokens = encode(first, SpecialTokens::with);
  const auto behind = encode(second, SpecialTokens::with);
  const auto place = tokens.size();
  tokens.insert(tokens.end(), behind.begin() + static_cast<std::ptrdiff_t>(*begin), behind.end());
  return {std::move(tokens), place};
}

void Tokenizer::encode(const std::function<std::string_view()>& text,
                       const std::function<void(std::span<const uint32_t>)>& tokens) const {
  codec_->encode(text, tokens);
}

std::string Tokenizer::decode(std::span<const int64_t> tokens, SpecialTokens special) const {
  std::vector<uint32_t> checked;
  for (const int64_t token : tokens) {
    if (token < 0 || token >= vocab_size()) {
      throw DataError(fmt::format("Token {} is outside of the tokenizer's vocabulary of {}.", token,
                                  vocab_size()));
    }
    checked.push_back(static_cast<uint32_t>(token));
  }
  return codec_->decode(checked, special);
}

std::optional<int64_t> Tokenizer::token(std::string_view piece) const {
  return codec_->token(piece);
}

std::vector<int64_t> Tokenizer::special_tokens() const { return codec_->special_tokens(); }

std::optional<int64_t> Tokenizer::unknown_token() const { return codec_->unknown_token(); }

}  // namespace zero
