// Turns text into token files for training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero {

struct PrepareOptions {
  std::vector<std::filesystem::path> inputs;  ///< text files, taken as one text in this order
  std::filesystem::path output;  ///< a folder that is absent or empty, or see `overwrite`
  /// "bpe" trains a byte-pair encoding on the training text; "bytes" makes each byte a token;
  /// anything else is the path of a tokenizer.json, of a folder with one, or of a sentencepiece
  /// model.
  std::string tokenizer = "bpe";
  int64_t vocab_size = 8192;  ///< of "bpe": 512 to 65536
  double validation_fraction =
      0.1;  ///< the share of the text, from its end and in whole lines, that validates; in (0, 1)
  bool whole = false;  ///< all of the text is for training: there is no val.bin
  int64_t max_validation_bytes = int64_t{4} << 20;  ///< at most so much of it
  /// The inputs are JSON lines (zero/data/example.h), each a document. The tokenizer is then a
  /// tokenizer.json, and train.marks.bin and val.marks.bin have a byte for each token: bit 0 says
  /// that the token is a target of the loss, bit 1 that it begins a document.
  bool json_lines = false;
  /// The JSON lines are texts, or pairs of them, with a label each (labelled_text.h), which are
  /// written to train.labels.bin and val.labels.bin.
  bool classify = false;
  /// Replace what an earlier preparation wrote to `output`, where that holds nothing else.
  bool overwrite = false;
};

struct PrepareResult {
  int64_t vocab_size = 0;
  int64_t train_tokens = 0;
  int64_t validation_tokens = 0;
  int64_t train_bytes = 0;
  int64_t validation_bytes = 0;
  /// The model given as `tokenizer` does not keep every text; tokenizer.model is a copy that does
  /// as far as its pieces allow: Note [Models of others] in prepare.cpp.
  bool tokenizer_changed = false;
  /// Tokens of a tokenizer.json that stand for what has no token.
  int64_t unknown_tokens = 0;
  int64_t documents = 0;               ///< of JSON lines, in both splits
  int64_t open_documents = 0;          ///< those that no special token ends
  std::vector<std::string> classes{};  ///< the names of the labels by number
  int64_t supervised_tokens = 0;       ///< of JSON lines, in both splits: the targets of the loss
};

/// Writes train.bin and val.bin (llm.c's format, of 32 bits where the vocabulary is above 65536),
/// the tokenizer (unless by bytes) and meta.json into `output`, which appears only when all of it
/// is complete. Throws ConfigError for options out of range; DataError for inputs that are missing,
/// empty, of another format than text, with a NUL or not UTF-8 (unless by bytes), an output that
/// exists, a vocabulary too large for the text, a split without text, tokens that do not decode to
/// the text (a model without byte fallback), a full disk, a line that is no document (with its
/// number), or more tokens than the format can count.
PrepareResult prepare(const PrepareOptions& options);

}  // namespace zero
