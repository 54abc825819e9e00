// A data set: tokens to train on and tokens to validate with.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/data/token_file.h"

namespace zero {

/// Tokens [begin, end) of files.
struct TokenRange {
  std::shared_ptr<const Tokens> tokens;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// The tokens that are trained on, or validated with: those of one source, or of several (a
/// mixture).
struct Split {
  Split() = default;
  // A range is a split of one source. NOLINTNEXTLINE(google-explicit-constructor)
  Split(TokenRange range) { sources.push_back(std::move(range)); }

  std::vector<TokenRange> sources{};
  /// How often the sources are sampled: Note [Order of samples] in token_loader.h. Empty: each
  /// sequence of all sources once in an epoch.
  std::vector<double> weights{};

  /// Returns the number of tokens.
  int64_t size() const;
  /// Returns whether a source has marks, which may leave tokens out of the loss.
  bool marked() const;
  /// Returns the files, for messages.
  std::string name() const;
};

struct SplitOptions {
  /// The share of a single file's tokens, taken from its end, that validates; in [0, 1). 0 means no
  /// validation split.
  double validation_fraction = 0.1;
  /// A validation has at most so many tokens: more would cost training data without a better
  /// estimate of the loss.
  int64_t max_validation_tokens = int64_t{1} << 20;
};

struct Dataset {
  Split train;
  Split validation;  ///< of size 0 when SplitOptions asked for none
  /// The tokens' vocabulary: from meta.json beside the files, or 256 for text; 0 when the file does
  /// not say (token files of others).
  int64_t vocab_size = 0;
  /// The sentencepiece model or the tokenizer.json that made the tokens. It is empty for bytes, or
  /// if it is not known.
  std::filesystem::path tokenizer;
  /// The names of the labels of classified texts, by number, from meta.json.
  std::vector<std::string> labels{};
  /// True where tokens are bytes: the loss is then in nats per byte, and text needs no tokenizer
  /// model.
  bool by_bytes = false;
};

/// Opens the data set at `path`:
/// - a folder with train.bin and val.bin (or train.txt and val.txt, or one pair X_train.bin and
///   X_val.bin), or with shards as llm.c's X_train_000001.bin, X_train_000002.bin ... and
///   X_val_000000.bin ..., which follow each other by number;
/// - a .bin of Megatron's with its .idx, by the same rules;
/// - a file whose name contains "train" and that has a sibling with "val" in its place: X_train.bin
///   and X_val.bin; one shard X_train_000007.bin trains alone, and all of X_val validate;
/// - any other file: its end validates, as `options` says.
/// Throws DataError for what TokenFile refuses, a folder without a pair, shards without shards to
/// validate with (unless `options` asks for none), shards between which one is missing or that have
/// several formats, a split without tokens, or a meta.json that cannot be read.
Dataset open_dataset(const std::filesystem::path& path, const SplitOptions& options = {});

/// Opens the data sets at `paths`, as open_dataset does, and joins them. Throws as both do.
Dataset open_mixture(const std::vector<std::filesystem::path>& paths,
                     const std::vector<double>& weights = {}, const SplitOptions& options = {});

/// Returns one data set whose splits have the sources of all of `parts`, in their order, which are
/// sampled by `weights` (Split::weights). Validation splits are validated with one after the other,
/// and weights change nothing there. Throws ConfigError unless there are no weights, or one above 0
/// for each part; DataError if the tokens of two parts may mean different things
/// (check_same_tokens), or if only some have labels, or other ones.
Dataset join(std::vector<Dataset> parts, const std::vector<double>& weights = {});

/// Throws DataError if a token of one data set may have another meaning in the other. Token files
/// that do not name their tokenizer pass. `names` are those of both, and `why` ends the message.
void check_same_tokens(const Dataset& one, const Dataset& other,
                       const std::array<std::string, 2>& names, std::string_view why);

}  // namespace zero
