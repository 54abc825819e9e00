#include "zero/data/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/data/chat_template.h"
#include "zero/data/filter.h"
#include "zero/data/line_writer.h"
#include "zero/data/read_chat_template.h"
#include "zero/data/round_trip.h"
#include "zero/data/text_files.h"
#include "zero/data/token_output.h"
#include "zero/data/tokenizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int kLeastVocabulary = 512;

void check(const PrepareOptions& options) {
  if (options.inputs.empty()) throw ConfigError("There are no text files to prepare.");
  if (options.tokenizer == "bpe" &&
      (options.vocab_size < kLeastVocabulary || options.vocab_size > 65536)) {
    throw ConfigError(fmt::format("The vocabulary size is {}; it must be {} to 65536.",
                                  options.vocab_size, kLeastVocabulary));
  }
  if (!(options.validation_fraction > 0 && options.validation_fraction < 1)) {
    throw ConfigError(fmt::format("The validation fraction is {}; it must be between 0 and 1.",
                                  options.validation_fraction));
  }
}

[[noreturn]] void refuse(const RoundTrip& round_trip) {
  throw DataError(
      fmt::format("The tokenizer does not keep the text: {}. Use the tokenizer \"bpe\", which is "
                  "trained on the "
                  "text and keeps all of it, or a sentencepiece model with byte fallback.",
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
// Throws where they do not decode to the text. A tokenizer.json may change text by intent (case,
// normal forms); of its tokens those that stand for what has no token are counted.
int64_t write_tokens(const fs::path& path, const Tokenizer& tokenizer, const FilterInput& pieces,
                     int64_t& unknown) {
  TokenOutput file(path, tokenizer.vocab_size());
  RoundTrip round_trip(pieces);
  const bool exact = tokenizer.pieces_are_text();
  const auto no_token = tokenizer.unknown_token();
  tokenizer.encode(pieces, [&](std::span<const uint32_t> tokens) {
    if (exact && !decode(tokenizer, tokens, round_trip)) refuse(round_trip);
    if (no_token) unknown += std::count(tokens.begin(), tokens.end(), *no_token);
    file.write(tokens);
  });
  if (exact && !round_trip.finish()) refuse(round_trip);
  return file.commit();
}

// All that a preparation writes.
constexpr std::string_view kFiles[] = {"train.bin",
                                       "val.bin",
                                       "train.marks.bin",
                                       "val.marks.bin",
                                       "train.labels.bin",
                                       "val.labels.bin",
                                       "tokenizer.model",
                                       "meta.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "config.json",
                                       "chat_template.jinja",
                                       "generation_config.json",
                                       "special_tokens_map.json"};

// These belong to a tokenizer.json.
constexpr std::string_view kBesideTokenizer[] = {"tokenizer_config.json", "chat_template.jinja",
                                                 "special_tokens_map.json"};

// Only what a preparation wrote is replaced, whatever the path was meant to be.
void check_replaceable(const fs::path& folder, bool overwrite) {
  const auto refuse = [&](std::string_view why) {
    throw DataError(fmt::format("The output folder {} exists and {}.", folder.string(), why));
  };
  std::error_code error;
  if (!fs::is_directory(folder, error) || fs::is_empty(folder, error)) return;
  if (!overwrite) refuse("is not empty. Give another, or overwrite it (--overwrite)");
  if (!fs::exists(folder / "meta.json", error))
    refuse("holds no meta.json, so no preparation wrote it. Give another");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (std::find(std::begin(kFiles), std::end(kFiles), name) != std::end(kFiles)) continue;
    refuse(fmt::format("holds {}, which no preparation writes. Give another, or move that away",
                       name));
  }
  if (error) refuse(fmt::format("cannot be listed: {}. Give another", error.message()));
}

void write_numbers(const fs::path& path, std::span<const int32_t> numbers) {
  const auto bytes = std::as_bytes(numbers);
  write_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, fail<DataError>);
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
  write_file(model, bytes, fail<DataError>);
  if (keeps(Tokenizer::load(source), kProbe)) return false;
  write_file(model, bytes + std::string(kKeepText), fail<DataError>);
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

// Returns the tokenizer.json that the option means; empty where it means something else.
fs::path json_tokenizer(const fs::path& option) {
  std::error_code error;
  if (fs::is_directory(option, error)) {
    return fs::exists(option / "tokenizer.json", error) ? option / "tokenizer.json" : fs::path();
  }
  return option.extension() == ".json" ? option : fs::path();
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
          "most. Give {}the tokenizer \"bytes\".",
          options.vocab_size, *most,
          *most < kLeastVocabulary ? "" : fmt::format("a vocabulary of {}, or ", *most)));
    }
  } else {
    std::error_code error;
    if (!fs::exists(options.tokenizer, error)) {
      throw DataError(fmt::format(
          "The tokenizer is {}; it should be bpe, bytes, the file of a sentencepiece model, a "
          "tokenizer.json, or a folder with one.",
          options.tokenizer));
    }
    const bool folder = fs::is_directory(options.tokenizer, error);
    changed = adopt(
        folder ? fs::path(options.tokenizer) / "tokenizer.model" : fs::path(options.tokenizer),
        model);
  }
  return Tokenizer::load(model);
}

// Copies a tokenizer.json, and what lies beside it. Errors of the tokenizer name `file`.
Tokenizer adopt_json(const fs::path& file, const fs::path& folder) {
  auto tokenizer = Tokenizer::load(file);
  write_file(folder / "tokenizer.json", read_file(file, fail<DataError>), fail<DataError>);
  copy_files(fs::absolute(file).parent_path(), folder, kBesideTokenizer, fail<DataError>);
  return tokenizer;
}

// Writes the end of a text that only the model's config.json named beside the copy of the
// tokenizer, where its readers look for it.
void name_end(const fs::path& folder, const Tokenizer& tokenizer, std::optional<int64_t> end) {
  if (!end || !special_token(folder, "eos_token").empty()) return;
  const auto path = folder / "special_tokens_map.json";
  auto tokens = read_object(path);
  tokens["eos_token"] = tokenizer.piece(static_cast<uint32_t>(*end));
  write_file(path, tokens.dump(2) + "\n", fail<DataError>);
}

}  // namespace

PrepareResult prepare(const PrepareOptions& options) {
  check(options);
  const bool by_bytes = options.tokenizer == "bytes";
  const auto source = json_tokenizer(options.tokenizer);
  const bool by_lines = options.json_lines || options.classify;
  if (by_lines && source.empty()) {
    throw ConfigError(
        fmt::format("The tokenizer is {}; JSON lines need a tokenizer.json, or a folder with one.",
                    options.tokenizer));
  }
  const TextFiles text(options.inputs, !by_bytes);
  const auto validation =
      std::min(static_cast<size_t>(static_cast<double>(text.size()) * options.validation_fraction),
               static_cast<size_t>(options.max_validation_bytes));
  const size_t boundary = options.whole ? text.size() : text.line_at(text.size() - validation);
  if (!options.whole && (boundary == 0 || boundary == text.size())) {
    throw DataError(
        fmt::format("The {} split would be empty: {} bytes of text have no line that starts in "
                    "their last {}. Give more text, or a share for validation that takes {}.",
                    boundary == 0 ? "training" : "validation", text.size(), validation,
                    boundary == 0 ? "less" : "a line at least (0.5: the second half)"));
  }
  check_replaceable(options.output, options.overwrite);
  WholeFolder folder(options.output, &fail<DataError>);
  PrepareResult result;
  const auto tokenizer =
      source.empty() ? make_tokenizer(options, text.pieces(0, boundary),
                                      folder.path() / "tokenizer.model", result.tokenizer_changed)
                     : adopt_json(source, folder.path());
  result.vocab_size = tokenizer.vocab_size();
  result.train_bytes = static_cast<int64_t>(boundary);
  result.validation_bytes = static_cast<int64_t>(text.size() - boundary);
  if (by_lines) {
    std::vector<Label> labels;
    const LineWriter lines(text, tokenizer, folder.path(), options.classify ? &labels : nullptr);
    name_end(folder.path(), tokenizer, lines.encoder().end());
    lines.write(0, boundary, "train", result.train_tokens, result);
    const size_t training = labels.size();
    if (!options.whole) lines.write(boundary, text.size(), "val", result.validation_tokens, result);
    if (options.classify) {
      auto classes = classes_of(labels);
      result.classes = std::move(classes.names);
      const auto numbers = std::span<const int32_t>(classes.numbers);
      write_numbers(folder.path() / "train.labels.bin", numbers.first(training));
      if (!options.whole)
        write_numbers(folder.path() / "val.labels.bin", numbers.subspan(training));
    }
  } else {
    result.train_tokens = write_tokens(folder.path() / "train.bin", tokenizer,
                                       text.pieces(0, boundary), result.unknown_tokens);
    if (!options.whole)
      result.validation_tokens =
          write_tokens(folder.path() / "val.bin", tokenizer, text.pieces(boundary, text.size()),
                       result.unknown_tokens);
  }

  nlohmann::ordered_json meta{{"tokenizer", by_bytes         ? "bytes"
                                            : source.empty() ? "tokenizer.model"
                                                             : "tokenizer.json"},
                              {"vocab_size", result.vocab_size},
                              {"train_tokens", result.train_tokens},
                              {"validation_tokens", result.validation_tokens},
                              {"train_bytes", result.train_bytes},
                              {"validation_bytes", result.validation_bytes}};
  if (by_lines) {
    meta["documents"] = result.documents;
    if (options.classify) meta["labels"] = result.classes;
    meta["supervised_tokens"] = result.supervised_tokens;
  }
  const auto json = meta.dump(2) + "\n";
  write_file(folder.path() / "meta.json", json, fail<DataError>);
  folder.commit();
  return result;
}

}  // namespace zero
