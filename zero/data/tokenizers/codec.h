// The interface of a kind of tokenizer; zero::Tokenizer is the front.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/data/tokenizer.h"

namespace zero::tokenizers {

using TextInput = std::function<std::string_view()>;
using TokenOutput = std::function<void(std::span<const uint32_t>)>;

/// The functions are those of zero::Tokenizer. Any number of threads may use it at once.
class Codec {
 public:
  explicit Codec(std::filesystem::path file) : file_(std::move(file)) {}
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;
  virtual ~Codec() = default;

  const std::filesystem::path& file() const { return file_; }
  virtual int64_t vocab_size() const = 0;
  virtual bool pieces_are_text() const { return true; }
  virtual const std::string& piece(uint32_t token) const = 0;
  virtual void encode(const TextInput& text, const TokenOutput& tokens) const = 0;
  virtual void encode(std::string_view text, SpecialTokens special,
                      std::vector<uint32_t>& tokens) const = 0;
  /// `tokens` are below vocab_size.
  virtual std::string decode(const std::vector<uint32_t>& tokens, SpecialTokens special) const = 0;
  virtual std::optional<int64_t> token(std::string_view /*piece*/) const { return {}; }
  virtual std::optional<int64_t> unknown_token() const { return {}; }
  virtual std::vector<int64_t> special_tokens() const { return {}; }
  /// Returns how many of its tokens a text with special ones loses at its beginning if it is the
  /// second of a pair; none where pairs have another form.
  virtual std::optional<size_t> tokens_before_a_second_text() const { return {}; }

 private:
  std::filesystem::path file_;
};

std::shared_ptr<const Codec> byte_codec();
std::shared_ptr<const Codec> sentencepiece_codec(const std::filesystem::path& model);
std::shared_ptr<const Codec> json_codec(const std::filesystem::path& file);

/// See Tokenizer::train.
void train_sentencepiece(const TextInput& text, int64_t vocab_size,
                         const std::filesystem::path& model);

}  // namespace zero::tokenizers
