#include "zero/data/token_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/foreign.h"
#include "zero/data/megatron.h"

namespace zero {
namespace {

constexpr uint64_t kTextCheckedAtStart = uint64_t{1} << 20;

// The first words of a file, zeros where it has none.
using Header = std::array<int32_t, 3>;

Header header_of(const InputFile& file) {
  Header header{};
  file.read_at(0, header.data(),
               std::min<uint64_t>(file.size() / sizeof(int32_t) * sizeof(int32_t), sizeof header));
  return header;
}

// Reads tokens into the end of `out` and widens them from its beginning: none is overwritten before
// it is read, since a token is no wider than an int64.
template <typename Token, bool text = false>
int64_t read_tokens(const InputFile& file, uint64_t offset, std::span<int64_t> out) {
  const auto bytes = std::as_writable_bytes(out);
  const auto source = bytes.last(out.size() * sizeof(Token));
  file.read_at(offset, source.data(), source.size());
  if (text) refuse_nul(file, {reinterpret_cast<const char*>(source.data()), source.size()}, offset);
  Token largest = 0;
  Token negative = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    Token token = 0;
    std::memcpy(&token, source.data() + i * sizeof token, sizeof token);
    largest = std::max(largest, token);
    if constexpr (std::is_signed_v<Token>) negative = std::min(negative, token);
    out[i] = token;
  }
  if (negative != 0) {
    const auto place = std::ranges::find(out, static_cast<int64_t>(negative)) - out.begin();
    throw DataError(fmt::format(
        "{} holds the number {} at token {}, and tokens are at least 0. Write the data again.",
        file.path().string(), static_cast<int64_t>(negative),
        static_cast<int64_t>(offset / sizeof(Token)) + place));
  }
  return largest;
}

}  // namespace

std::filesystem::path marks_of(std::filesystem::path tokens) {
  return tokens.replace_extension(".marks.bin");
}

std::filesystem::path labels_of(std::filesystem::path tokens) {
  return tokens.replace_extension(".labels.bin");
}

std::string_view name(TokenFormat format) {
  switch (format) {
    case TokenFormat::bytes:
      return "text by bytes";
    case TokenFormat::llm_c:
      return "llm.c tokens";
    case TokenFormat::llm_c_32:
      return "llm.c tokens of 32 bits";
    case TokenFormat::nano_gpt:
      return "nanoGPT tokens";
    case TokenFormat::megatron:
      return "Megatron tokens";
  }
  return "";
}

TokenFile::TokenFile(const std::filesystem::path& path, std::optional<TokenFormat> format)
    : file_(std::make_unique<InputFile>(path, &fail<DataError>)) {
  const auto bytes = static_cast<int64_t>(file_->size());
  const auto file = path.string();
  if (bytes == 0) throw DataError(fmt::format("{} is empty.", file));
  const auto header = header_of(*file_);
  const bool binary = path.extension() == ".bin";
  const auto index = MegatronIndex::path_of(path);
  const bool indexed = binary && !format && MegatronIndex::is_index(index);
  format_ = format                      ? *format
            : indexed                   ? TokenFormat::megatron
            : header[0] == kLlmCMagic   ? TokenFormat::llm_c
            : header[0] == kLlmC32Magic ? TokenFormat::llm_c_32
            : binary                    ? TokenFormat::nano_gpt
                                        : TokenFormat::bytes;
  const bool wide = format_ == TokenFormat::llm_c_32;
  const bool has_header = wide || format_ == TokenFormat::llm_c;
  if (!format && !has_header && !indexed) refuse_foreign(*file_, binary);
  token_bytes_ = format_ == TokenFormat::bytes ? 1 : wide ? 4 : 2;
  if (format_ == TokenFormat::megatron) {
    index_ = std::make_unique<const MegatronIndex>(index, path, file_->size());
    token_bytes_ = index_->token_bytes();
  }
  std::error_code ignored;
  if (binary && format_ == TokenFormat::nano_gpt && std::filesystem::exists(index, ignored)) {
    throw DataError(fmt::format(
        "{} stands beside {}, and does not begin as Megatron's index does (MMIDIDX): it is "
        "damaged, or of something else. Copy the index again, or remove it.",
        index.string(), file));
  }

  if (format_ == TokenFormat::bytes) {
    std::string start(std::min(file_->size(), kTextCheckedAtStart), '\0');
    file_->read_at(0, start.data(), start.size());
    refuse_nul(*file_, start, 0);
    size_ = bytes;
    return;
  }
  if (has_header) {
    const int32_t magic = wide ? kLlmC32Magic : kLlmCMagic;
    const int32_t version = wide ? kLlmC32Version : kLlmCVersion;
    if (bytes < static_cast<int64_t>(kLlmCHeaderBytes)) {
      throw DataError(fmt::format(
          "{} is truncated: it has {} bytes, and the header of llm.c tokens alone has {}.", file,
          bytes, kLlmCHeaderBytes));
    }
    if (header[0] != magic) {
      throw DataError(fmt::format("{} does not hold {}: its first word is {}, not {}.", file,
                                  zero::name(format_), header[0], magic));
    }
    if (header[1] != version) {
      throw DataError(fmt::format("{} holds {} of version {}; only version {} is supported.", file,
                                  zero::name(format_), header[1], version));
    }
    header_ = kLlmCHeaderBytes;
  }
  const int64_t payload = bytes - static_cast<int64_t>(header_);
  if (payload % token_bytes_ != 0) {
    throw DataError(
        fmt::format("{} is damaged: its tokens have {} bytes each, yet {} bytes hold them.", file,
                    token_bytes_, payload));
  }
  size_ = payload / token_bytes_;
  if (has_header && header[2] != size_) {
    throw DataError(fmt::format("{} is {}: its header promises {} tokens, and it holds {}.", file,
                                header[2] > size_ ? "truncated" : "damaged", header[2], size_));
  }
  if (size_ == 0) throw DataError(fmt::format("{} holds no tokens.", file));
  open_marks();
}

void TokenFile::open_marks() {
  const auto marks = marks_of(path());
  std::error_code ignored;
  if (!std::filesystem::exists(marks, ignored)) return;
  marks_ = std::make_unique<InputFile>(marks, &fail<DataError>);
  if (static_cast<int64_t>(marks_->size()) == size_) return;
  throw DataError(fmt::format(
      "{} has {} marks, but {} has {} tokens: there is a mark of one byte for each token. Prepare "
      "the data again, or remove the marks.",
      marks.string(), marks_->size(), path().string(), size_));
}

TokenFile::~TokenFile() = default;

const std::filesystem::path& TokenFile::path() const { return file_->path(); }

std::string_view TokenFile::contents() const {
  return index_ ? index_->name() : zero::name(format_);
}

bool TokenFile::is_signed() const { return index_ && index_->is_signed(); }

int64_t TokenFile::vocab_limit() const {
  const auto bits = 8 * token_bytes_ - (is_signed() ? 1 : 0);
  return bits >= 63 ? std::numeric_limits<int64_t>::max() : int64_t{1} << bits;
}

int64_t TokenFile::read(int64_t begin, std::span<int64_t> out) const {
  ensure(begin >= 0 && begin + static_cast<int64_t>(out.size()) <= size_,
         "a range of tokens within the file");
  const auto offset = header_ + static_cast<uint64_t>(token_bytes_ * begin);
  switch (token_bytes_) {
    case 1:
      if (format_ == TokenFormat::bytes) return read_tokens<uint8_t, true>(*file_, offset, out);
      return read_tokens<uint8_t>(*file_, offset, out);
    case 2:
      return is_signed() ? read_tokens<int16_t>(*file_, offset, out)
                         : read_tokens<uint16_t>(*file_, offset, out);
    case 4:
      return is_signed() ? read_tokens<int32_t>(*file_, offset, out)
                         : read_tokens<uint32_t>(*file_, offset, out);
    default:
      return read_tokens<int64_t>(*file_, offset, out);
  }
}

void TokenFile::read_marks(int64_t begin, std::span<uint8_t> out) const {
  ensure(begin >= 0 && begin + static_cast<int64_t>(out.size()) <= size_,
         "a range of marks within the file");
  if (!marks_) {
    std::ranges::fill(out, kSupervised);
    if (index_) index_->mark_documents(begin, out);
    return;
  }
  marks_->read_at(static_cast<uint64_t>(begin), out.data(), out.size());
  const auto wrong = std::find_if(out.begin(), out.end(), [](uint8_t mark) {
    return (mark & ~(kSupervised | kBeginsDocument | kSecondText)) != 0;
  });
  if (wrong == out.end()) return;
  throw DataError(fmt::format("{} holds the byte {} at {}, which is no mark of a token (0 to 7).",
                              marks_->path().string(), *wrong, begin + (wrong - out.begin())));
}

void TokenFile::will_need(int64_t begin, int64_t count) const {
  const auto width = static_cast<uint64_t>(token_bytes_);
  file_->will_need(header_ + width * static_cast<uint64_t>(begin),
                   width * static_cast<uint64_t>(count));
}

Tokens::Tokens(const std::vector<std::filesystem::path>& paths) {
  for (const auto& path : paths) {
    const auto& file = *files_.emplace_back(std::make_unique<const TokenFile>(path));
    if (file.contents() != files_.front()->contents()) {
      throw DataError(
          fmt::format("{} holds {}, and {} holds {}: the shards of one data set have one format.",
                      files_.front()->path().string(), files_.front()->contents(), path.string(),
                      file.contents()));
    }
    if (file.marked() != marked()) {
      throw DataError(fmt::format(
          "Only one of {} and {} has marks ({}): the shards of one data set all have them, or "
          "none.",
          files_.front()->path().string(), path.string(), marks_of(path).filename().string()));
    }
    ends_.push_back(size() + file.size());
  }
  ensure(!files_.empty(), "a file of tokens");
}

std::string Tokens::name() const {
  const auto first = files_.front()->path().string();
  return files_.size() == 1
             ? first
             : fmt::format("{} and the {} shards after it", first, files_.size() - 1);
}

template <typename Visit>
void Tokens::visit(int64_t begin, int64_t count, const Visit& visit) const {
  ensure(begin >= 0 && count <= size() - begin, "a range of tokens within the files");
  const auto found = std::upper_bound(ends_.begin(), ends_.end(), begin);
  for (auto index = static_cast<size_t>(found - ends_.begin()); count > 0; ++index) {
    const auto& file = *files_[index];
    const int64_t within = begin - (ends_[index] - file.size());
    const int64_t here = std::min(count, file.size() - within);
    visit(file, within, here);
    begin += here;
    count -= here;
  }
}

int64_t Tokens::read(int64_t begin, std::span<int64_t> out) const {
  int64_t largest = 0;
  auto rest = out;
  visit(begin, static_cast<int64_t>(out.size()),
        [&](const TokenFile& file, int64_t within, int64_t count) {
          largest = std::max(largest, file.read(within, rest.first(static_cast<size_t>(count))));
          rest = rest.subspan(static_cast<size_t>(count));
        });
  return largest;
}

void Tokens::read_marks(int64_t begin, std::span<uint8_t> out) const {
  auto rest = out;
  visit(begin, static_cast<int64_t>(out.size()),
        [&](const TokenFile& file, int64_t within, int64_t count) {
          file.read_marks(within, rest.first(static_cast<size_t>(count)));
          rest = rest.subspan(static_cast<size_t>(count));
        });
}

void Tokens::will_need(int64_t begin, int64_t count) const {
  visit(begin, count,
        [](const TokenFile& file, int64_t within, int64_t here) { file.will_need(within, here); });
}

}  // namespace zero
