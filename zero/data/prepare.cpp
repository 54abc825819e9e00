#include "zero/data/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/data/filter.h"
#include "zero/data/foreign.h"
#include "zero/data/round_trip.h"
#include "zero/data/token_file.h"
#include "zero/data/tokenizer.h"
#include "zero/data/utf8.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int kLeastVocabulary = 512;

void check(const PrepareOptions& options) {
  if (options.inputs.empty()) throw ConfigError("There are no text files to prepare.");
  if (options.tokenizer == "bpe" &&
      (options.vocab_size < kLeastVocabulary || options.vocab_size > 65536)) {
    throw ConfigError(fmt::format("--vocab-size is {}; it must be {} to 65536.", options.vocab_size,
                                  kLeastVocabulary));
  }
  if (!(options.validation_fraction > 0 && options.validation_fraction < 1)) {
    throw ConfigError(fmt::format("The validation fraction is {}; it must be between 0 and 1.",
                                  options.validation_fraction));
  }
}

constexpr size_t kBlock = size_t{1} << 20;

// Throws for what is no text.
void check_text(const InputFile& file, bool must_be_utf8) {
  if (file.size() == 0) throw DataError(fmt::format("{} is empty.", file.path().string()));
  refuse_foreign(file, false);
  std::string block;
  for (uint64_t at = 0; at < file.size();) {
    block.resize(std::min<uint64_t>(kBlock, file.size() - at));
    file.read_at(at, block.data(), block.size());
    refuse_nul(file, block, at);
    const size_t good = must_be_utf8 ? valid_utf8(block) : block.size();
    const bool cut = at + block.size() < file.size() && block.size() - good < 4;
    at += good;
    if (good < block.size() && !cut) {
      throw DataError(
          fmt::format("{} is not UTF-8 text at byte {}. Convert it, or prepare it by bytes.",
                      file.path().string(), at));
    }
  }
}

// The inputs as one text, in which each file's last line is ended.
class Text {
 public:
  Text(const std::vector<fs::path>& paths, bool must_be_utf8) {
    for (const auto& path : paths) {
      InputFile file(path, &fail<DataError>);
      check_text(file, must_be_utf8);
      char last = 0;
      file.read_at(file.size() - 1, &last, 1);
      size_ += file.size() + (last == '\n' ? 0 : 1);
      parts_.push_back({std::move(file), size_});
    }
  }

  size_t size() const { return size_; }

  // Its bytes from `offset` on: all that one file has, but at most kBlock; none at the end.
  void read(size_t offset, std::string& block) const {
    const auto part = std::upper_bound(parts_.begin(), parts_.end(), offset,
                                       [](size_t at, const Part& one) { return at < one.end; });
    block.clear();
    if (part == parts_.end()) return;
    const size_t begin = part == parts_.begin() ? 0 : std::prev(part)->end;
    block.resize(std::min(kBlock, part->end - offset), '\n');
    const size_t stored = part->file.size() - std::min(part->file.size(), offset - begin);
    part->file.read_at(offset - begin, block.data(), std::min(block.size(), stored));
  }

  // The pieces of [begin, end), one after the other.
  auto pieces(size_t begin, size_t end) const {
    return [this, begin, end, block = std::string()]() mutable -> std::string_view {
      if (begin == end) return {};
      read(begin, block);
      block.resize(std::min(block.size(), end - begin));
      begin += block.size();
      return block;
    };
  }

  // The first start of a line at or after `offset`.
  size_t line_at(size_t offset) const {
    if (offset == 0) return 0;
    std::string block;
    for (size_t at = offset - 1; at < size_; at += block.size()) {
      read(at, block);
      const auto newline = block.find('\n');
      if (newline != std::string::npos) return at + newline + 1;
    }
    return size_;
  }

 private:
  struct Part {
    InputFile file;
    size_t end;  // in the text
  };
  std::vector<Part> parts_;
  size_t size_ = 0;
};

[[noreturn]] void refuse(const RoundTrip& round_trip) {
  throw DataError(fmt::format(
      "The tokenizer does not keep the text: {}. Use --tokenizer bpe, which is trained on the text "
      "and keeps all of it, or a sentencepiece model with byte fallback.",
      round_trip.difference()));
}

bool decode(const Tokenizer& tokenizer, std::span<const uint32_t> tokens, RoundTrip& text) {
  return std::all_of(tokens.begin(), tokens.end(),
                     [&](uint32_t token) { return text.feed(tokenizer.piece(token)); });
}

bool keeps(const Tokenizer& tokenizer, std::string_view text) {
  const auto pieces = [rest = text]() mutable { return std::exchange(rest, {}); };
  RoundTrip round_trip(pieces);
  bool kept = true;
  tokenizer.encode(pieces, [&](std::span<const uint32_t> tokens) {
    kept = kept && decode(tokenizer, tokens, round_trip);
  });
  return kept && round_trip.finish();
}

// Writes the tokens of `pieces`, which give the same text each time, and returns their number.
// Throws where they do not decode to the text.
int64_t write_tokens(const fs::path& path, const Tokenizer& tokenizer, const FilterInput& pieces) {
  OutputFile file(path, &fail<DataError>);
  std::array<int32_t, kLlmCHeaderBytes / sizeof(int32_t)> header{kLlmCMagic, kLlmCVersion};
  file.write(header.data(), kLlmCHeaderBytes);
  int64_t count = 0;
  std::vector<uint16_t> narrow;
  RoundTrip round_trip(pieces);
  tokenizer.encode(pieces, [&](std::span<const uint32_t> tokens) {
    if (!decode(tokenizer, tokens, round_trip)) refuse(round_trip);
    narrow.assign(tokens.begin(), tokens.end());
    file.write(narrow.data(), narrow.size() * sizeof(uint16_t));
    count += static_cast<int64_t>(tokens.size());
  });
  if (!round_trip.finish()) refuse(round_trip);
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
  if (!overwrite) refuse("is not empty. Give another --out, or --overwrite to replace it");
  if (!fs::exists(folder / "meta.json", error))
    refuse("holds no meta.json, so no preparation wrote it. Give another --out");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (std::find(std::begin(kFiles), std::end(kFiles), name) != std::end(kFiles)) continue;
    refuse(fmt::format(
        "holds {}, which no preparation writes. Give another --out, or move that away", name));
  }
  if (error) refuse(fmt::format("cannot be listed: {}. Give another --out", error.message()));
}

void write_file(const fs::path& path, std::string_view bytes) {
  OutputFile file(path, &fail<DataError>);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

// Note [Models of others]
// Most sentencepiece models normalise: they put a blank before each text, drop blanks that repeat,
// take line ends for blanks and compose characters, so that the tokens no longer say the text. How
// is told by field 3 of the model (NormalizerSpec), and where a message is repeated in a protocol
// buffer, its later fields count. So these bytes at its end make a model encode text as it is:
// name "identity", no map of characters, no blank before the text, and repeated blanks kept. What
// then has neither a piece nor a fallback to bytes is lost, and refused.
constexpr std::string_view kKeepText{"\x1A\x10\x0A\x08identity\x12\0\x18\0\x20\0", 18};

// A text of what models normalise: blanks, line ends, and characters with a compatible one.
constexpr std::string_view kProbe =
    " two  blanks\t and a tab \n\n  indented \xEF\xBC\xA1\xEF\xAC\x81\xC2\xA0\n";

// Copies the model of somebody else to `model`; returns whether it had to be changed.
bool adopt(const fs::path& source, const fs::path& model) {
  const auto bytes = read_file(source, &fail<DataError>);
  write_file(model, bytes);
  if (keeps(Tokenizer::load(model), kProbe)) return false;
  write_file(model, bytes + std::string(kKeepText));
  return true;
}

// "... too high (8192). Please set it to a value <= 423.", says sentencepiece.
std::optional<int> most_tokens(std::string_view message) {
  constexpr std::string_view kBefore = "Please set it to a value <= ";
  const auto at = message.find(kBefore);
  int most = 0;
  if (at == std::string_view::npos) return {};
  const auto* from = message.data() + at + kBefore.size();
  const auto [end, error] = std::from_chars(from, message.data() + message.size(), most);
  return error == std::errc() ? std::optional(most) : std::nullopt;
}

Tokenizer make_tokenizer(const PrepareOptions& options, const FilterInput& training_text,
                         const fs::path& model, bool& changed) {
  if (options.tokenizer == "bytes") return Tokenizer::bytes();
  if (options.tokenizer == "bpe") {
    try {
      Tokenizer::train(training_text, options.vocab_size, model);
    } catch (const DataError& error) {
      const auto most = most_tokens(error.what());
      if (!most) {
        throw DataError(fmt::format("Training a byte-pair encoding of {} tokens failed: {}",
                                    options.vocab_size, error.what()));
      }
      throw DataError(fmt::format(
          "The text has too few different words for a byte-pair encoding of {} tokens: {} are the "
          "most. Give {}--tokenizer bytes.",
          options.vocab_size, *most,
          *most < kLeastVocabulary ? "" : fmt::format("--vocab-size {}, or ", *most)));
    }
  } else {
    std::error_code error;
    if (!fs::exists(options.tokenizer, error)) {
      throw DataError(fmt::format(
          "--tokenizer is {}; it should be bpe, bytes, or the file of a sentencepiece model.",
          options.tokenizer));
    }
    changed = adopt(options.tokenizer, model);
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
  check_replaceable(options.output, options.overwrite);
  WholeFolder folder(options.output, &fail<DataError>);
  PrepareResult result;
  const auto tokenizer =
      make_tokenizer(options, text.pieces(0, boundary), folder.path() / "tokenizer.model",
                     result.tokenizer_changed);
  result.vocab_size = tokenizer.vocab_size();
  result.train_bytes = static_cast<int64_t>(boundary);
  result.validation_bytes = static_cast<int64_t>(text.size() - boundary);
  result.train_tokens =
      write_tokens(folder.path() / "train.bin", tokenizer, text.pieces(0, boundary));
  result.validation_tokens =
      write_tokens(folder.path() / "val.bin", tokenizer, text.pieces(boundary, text.size()));

  const nlohmann::ordered_json meta{{"tokenizer", by_bytes ? "bytes" : "tokenizer.model"},
                                    {"vocab_size", result.vocab_size},
                                    {"train_tokens", result.train_tokens},
                                    {"validation_tokens", result.validation_tokens},
                                    {"train_bytes", result.train_bytes},
                                    {"validation_bytes", result.validation_bytes}};
  const auto json = meta.dump(2) + "\n";
  write_file(folder.path() / "meta.json", json);
  folder.commit();
  return result;
}

}  // namespace zero
