#include "zero/data/token_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

// Other files of llm.c, which end in .bin too.
constexpr std::pair<int32_t, const char*> kOtherMagics[] = {
    {20240326, "a model of llm.c"},
    {20240327, "a debug state of llm.c"},
    {20240328, "a tokenizer of llm.c"},
    {20240522, "an evaluation file of llm.c"},
    {20240801, "a file of 32-bit tokens of llm.c (Llama 3), which is not supported"},
};

int32_t word(std::span<const std::byte> bytes, size_t index) {
  int32_t value = 0;
  if (bytes.size() >= (index + 1) * sizeof value) {
    std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  }
  return value;
}

TokenFormat guess(const MappedFile& file) {
  if (word(file.bytes(), 0) == kLlmCMagic) return TokenFormat::llm_c;
  return file.path().extension() == ".bin" ? TokenFormat::nano_gpt : TokenFormat::bytes;
}

template <typename Token>
int64_t copy(const std::byte* source, std::span<int64_t> out) {
  Token largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    Token token = 0;
    std::memcpy(&token, source + i * sizeof token, sizeof token);
    largest = std::max(largest, token);
    out[i] = token;
  }
  return largest;
}

}  // namespace

std::string_view name(TokenFormat format) {
  switch (format) {
    case TokenFormat::bytes:
      return "text by bytes";
    case TokenFormat::llm_c:
      return "llm.c tokens";
    case TokenFormat::nano_gpt:
      return "nanoGPT tokens";
  }
  return "";
}

TokenFile::TokenFile(const std::filesystem::path& path, std::optional<TokenFormat> format)
    : file_(std::make_unique<MappedFile>(path, &fail<DataError>)) {
  const auto bytes = file_->bytes();
  const auto file = path.string();
  if (bytes.empty()) throw DataError(fmt::format("{} is empty.", file));
  format_ = format.value_or(guess(*file_));

  if (format_ == TokenFormat::bytes) {
    size_ = static_cast<int64_t>(bytes.size());
    return;
  }
  if (format_ == TokenFormat::llm_c || path.extension() == ".bin") {
    for (const auto& [magic, what] : kOtherMagics) {
      if (word(bytes, 0) == magic)
        throw DataError(fmt::format("{} is not a file of tokens but {}.", file, what));
    }
  }
  if (format_ == TokenFormat::llm_c) {
    if (bytes.size() < kLlmCHeaderBytes) {
      throw DataError(fmt::format(
          "{} is truncated: it has {} bytes, and the header of llm.c tokens alone has {}.", file,
          bytes.size(), kLlmCHeaderBytes));
    }
    if (word(bytes, 0) != kLlmCMagic) {
      throw DataError(fmt::format("{} does not hold llm.c tokens: its first word is {}, not {}.",
                                  file, word(bytes, 0), kLlmCMagic));
    }
    if (word(bytes, 1) != kLlmCVersion) {
      throw DataError(fmt::format(
          "{} holds llm.c tokens of version {}; only version {} (u16 tokens) is supported.", file,
          word(bytes, 1), kLlmCVersion));
    }
    header_ = kLlmCHeaderBytes;
  }
  const size_t payload = bytes.size() - header_;
  if (payload % 2 != 0) {
    throw DataError(fmt::format(
        "{} is damaged: its tokens have 2 bytes each, yet {} bytes hold them.", file, payload));
  }
  size_ = static_cast<int64_t>(payload / 2);
  if (format_ == TokenFormat::llm_c && word(bytes, 2) != size_) {
    throw DataError(fmt::format("{} is {}: its header promises {} tokens, and it holds {}.", file,
                                word(bytes, 2) > size_ ? "truncated" : "damaged", word(bytes, 2),
                                size_));
  }
  if (size_ == 0) throw DataError(fmt::format("{} holds no tokens.", file));
}

TokenFile::~TokenFile() = default;

const std::filesystem::path& TokenFile::path() const { return file_->path(); }

int64_t TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  ensure(begin >= 0 && begin + static_cast<int64_t>(out.size()) <= size_,
         "a range of tokens within the file");
  if (format_ == TokenFormat::bytes) return copy<uint8_t>(file_->bytes().data() + begin, out);
  return copy<uint16_t>(file_->bytes().data() + header_ + 2 * begin, out);
}

void TokenFile::will_need(int64_t begin, int64_t count) const {
  const size_t width = format_ == TokenFormat::bytes ? 1 : 2;
  file_->will_need(header_ + width * begin, width * count);
}

}  // namespace zero
