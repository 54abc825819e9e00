#include "zero/data/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/data/token_file.h"
#include "zero/data/tokenizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

void check(const PrepareOptions& options) {
  if (options.inputs.empty()) throw ConfigError("There are no text files to prepare.");
  if (options.tokenizer == "bpe" && (options.vocab_size < 512 || options.vocab_size > 65536)) {
    throw ConfigError(
        fmt::format("The vocabulary size is {}; it must be 512 to 65536.", options.vocab_size));
  }
  if (!(options.validation_fraction > 0 && options.validation_fraction < 1)) {
    throw ConfigError(fmt::format("The validation fraction is {}; it must be between 0 and 1.",
                                  options.validation_fraction));
  }
}

// The offset of the first byte that is not part of a UTF-8 character, or the size.
size_t valid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xC2 && lead < 0xE0 ? 2
                          : lead >= 0xE0 && lead < 0xF0 ? 3
                          : lead >= 0xF0 && lead < 0xF5 ? 4
                                                        : 0;
    if (length == 0 || at + length > text.size()) return at;
    const auto second = static_cast<unsigned char>(length > 1 ? text[at + 1] : 0);
    // Longer than need be, a surrogate, beyond the last character.
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
        (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F))
      return at;
    for (size_t i = 1; i < length; ++i) {
      if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return at;
    }
    at += length;
  }
  return at;
}

// The inputs as one text, in pieces that stay in the mapped files.
class Text {
 public:
  Text(const std::vector<fs::path>& paths, bool must_be_utf8) {
    for (const auto& path : paths) {
      const auto& file = *files_.emplace_back(std::make_unique<MappedFile>(path, &fail<DataError>));
      const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                                  file.bytes().size());
      if (text.empty()) throw DataError(fmt::format("{} is empty.", path.string()));
      if (const size_t good = valid_utf8(text); must_be_utf8 && good < text.size()) {
        throw DataError(
            fmt::format("{} is not UTF-8 text at byte {}. Convert it, or prepare it by bytes.",
                        path.string(), good));
      }
      pieces_.push_back(text);
      if (text.back() != '\n') pieces_.emplace_back("\n");
    }
    for (const auto piece : pieces_) size_ += piece.size();
  }

  size_t size() const { return size_; }

  // The pieces of [begin, end).
  std::vector<std::string_view> range(size_t begin, size_t end) const {
    std::vector<std::string_view> out;
    for (const auto piece : pieces_) {
      const size_t first = std::min(begin, piece.size());
      const size_t last = std::min(end, piece.size());
      if (first < last) out.push_back(piece.substr(first, last - first));
      begin -= first;
      end -= last;
    }
    return out;
  }

  // The first start of a line at or after `offset`.
  size_t line_at(size_t offset) const {
    if (offset == 0) return 0;
    size_t at = offset - 1;
    for (const auto piece : range(at, size_)) {
      const auto newline = piece.find('\n');
      if (newline != std::string_view::npos) return at + newline + 1;
      at += piece.size();
    }
    return size_;
  }

 private:
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<std::string_view> pieces_;
  size_t size_ = 0;
};

auto feeder(std::vector<std::string_view> pieces) {
  return [pieces = std::move(pieces), next = size_t{0}]() mutable {
    return next < pieces.size() ? pieces[next++] : std::string_view{};
  };
}

// Returns the number of tokens.
int64_t write_tokens(const fs::path& path, const Tokenizer& tokenizer,
                     std::vector<std::string_view> text) {
  OutputFile file(path, &fail<DataError>);
  std::array<int32_t, kLlmCHeaderBytes / sizeof(int32_t)> header{kLlmCMagic, kLlmCVersion};
  file.write(header.data(), kLlmCHeaderBytes);
  int64_t count = 0;
  std::vector<uint16_t> narrow;
  tokenizer.encode(feeder(std::move(text)), [&](std::span<const uint32_t> tokens) {
    narrow.assign(tokens.begin(), tokens.end());
    file.write(narrow.data(), narrow.size() * sizeof(uint16_t));
    count += static_cast<int64_t>(tokens.size());
  });
  if (count > std::numeric_limits<int32_t>::max()) {
    throw DataError(fmt::format(
        "{} would hold {} tokens; llm.c's format counts at most {}. Prepare the text in parts.",
        path.string(), count, std::numeric_limits<int32_t>::max()));
  }
  header[2] = static_cast<int32_t>(count);
  file.write_at(0, header.data(), kLlmCHeaderBytes);
  file.commit();
  return count;
}

// All that a preparation writes.
constexpr std::string_view kFiles[] = {"train.bin", "val.bin", "tokenizer.model", "meta.json"};

// Only what a preparation wrote is replaced, whatever the path was meant to be.
void check_replaceable(const fs::path& folder, bool overwrite) {
  const auto refuse = [&](std::string_view why) {
    throw DataError(fmt::format("The output folder {} exists and {}.", folder.string(), why));
  };
  std::error_code error;
  if (!fs::is_directory(folder, error) || fs::is_empty(folder, error)) return;
  if (!overwrite) refuse("is not empty. Choose another, or allow overwriting it");
  if (!fs::exists(folder / "meta.json", error))
    refuse("holds no meta.json, so no preparation wrote it. Choose another");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (std::find(std::begin(kFiles), std::end(kFiles), name) != std::end(kFiles)) continue;
    refuse(fmt::format("holds {}, which no preparation writes. Choose another, or move that away",
                       name));
  }
  if (error) refuse(fmt::format("cannot be listed: {}. Choose another", error.message()));
}

Tokenizer make_tokenizer(const PrepareOptions& options,
                         const std::vector<std::string_view>& training_text,
                         const fs::path& model) {
  if (options.tokenizer == "bytes") return Tokenizer::bytes();
  if (options.tokenizer == "bpe") {
    try {
      Tokenizer::train(feeder(training_text), options.vocab_size, model);
    } catch (const DataError& error) {
      throw DataError(
          fmt::format("Training a byte-pair encoding of {} tokens failed: {} Where the text is too "
                      "short for as many, give another --vocab-size, or --tokenizer bytes.",
                      options.vocab_size, error.what()));
    }
  } else {
    const MappedFile source(options.tokenizer, &fail<DataError>);
    OutputFile copy(model, &fail<DataError>);
    copy.write(source.bytes().data(), source.bytes().size());
    copy.commit();
  }
  auto tokenizer = Tokenizer::load(model);
  if (tokenizer.vocab_size() > 65536) {
    throw DataError(fmt::format(
        "The tokenizer {} has {} tokens; token files hold at most 65536 different ones.",
        options.tokenizer, tokenizer.vocab_size()));
  }
  return tokenizer;
}

}  // namespace

PrepareResult prepare(const PrepareOptions& options) {
  check(options);
  const bool by_bytes = options.tokenizer == "bytes";
  const Text text(options.inputs, !by_bytes);
  const auto validation =
      std::min(static_cast<size_t>(static_cast<double>(text.size()) * options.validation_fraction),
               static_cast<size_t>(options.max_validation_bytes));
  const size_t boundary = text.line_at(text.size() - validation);
  if (boundary == 0 || boundary == text.size()) {
    throw DataError(
        fmt::format("The {} split would be empty: {} bytes of text have no line that starts in "
                    "their last {}. Give more text or another fraction.",
                    boundary == 0 ? "training" : "validation", text.size(), validation));
  }
  const auto training_text = text.range(0, boundary);

  check_replaceable(options.output, options.overwrite);
  WholeFolder folder(options.output, &fail<DataError>);
  const auto tokenizer = make_tokenizer(options, training_text, folder.path() / "tokenizer.model");
  PrepareResult result;
  result.vocab_size = tokenizer.vocab_size();
  result.train_bytes = static_cast<int64_t>(boundary);
  result.validation_bytes = static_cast<int64_t>(text.size() - boundary);
  result.train_tokens = write_tokens(folder.path() / "train.bin", tokenizer, training_text);
  result.validation_tokens =
      write_tokens(folder.path() / "val.bin", tokenizer, text.range(boundary, text.size()));

  const nlohmann::ordered_json meta{{"tokenizer", by_bytes ? "bytes" : "tokenizer.model"},
                                    {"vocab_size", result.vocab_size},
                                    {"train_tokens", result.train_tokens},
                                    {"validation_tokens", result.validation_tokens},
                                    {"train_bytes", result.train_bytes},
                                    {"validation_bytes", result.validation_bytes}};
  const auto json = meta.dump(2) + "\n";
  OutputFile file(folder.path() / "meta.json", &fail<DataError>);
  file.write(json.data(), json.size());
  file.commit();
  folder.commit();
  return result;
}

}  // namespace zero
