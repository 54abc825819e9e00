// A data set: tokens to train on and tokens to validate with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
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

struct SplitOptions {
  /// The share of a single file's tokens, taken from its end, that validates; in [0, 1). 0 means no
  /// validation split.
  double validation_fraction = 0.1;
  /// A validation has at most so many tokens: more would cost training data without a better
  /// estimate of the loss.
  int64_t max_validation_tokens = int64_t{1} << 20;
};

struct Dataset {
  TokenRange train;
  TokenRange validation;  ///< of size 0 when SplitOptions asked for none
  /// The tokens' vocabulary: from meta.json beside the files, or 256 for text; 0 when the file does
  /// not say (token files of others).
  int64_t vocab_size = 0;
  /// This sentencepiece model made the tokens. It is empty for bytes, or if it is not known.
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
/// - a file whose name contains "train" and that has a sibling with "val" in its place: X_train.bin
///   and X_val.bin; one shard X_train_000007.bin trains alone, and all of X_val validate;
/// - any other file: its end validates, as `options` says.
/// Throws DataError for what TokenFile refuses, a folder without a pair, shards without shards to
/// validate with (unless `options` asks for none), shards between which one is missing or that have
/// several formats, a split without tokens, or a meta.json that cannot be read.
Dataset open_dataset(const std::filesystem::path& path, const SplitOptions& options = {});

}  // namespace zero
