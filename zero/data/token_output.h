// Writes a file of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "zero/checkpoint/file.h"
#include "zero/data/token_file.h"

namespace zero {

/// A file in llm.c's format, of 16 bits a token where the vocabulary fits and of 32 otherwise.
class TokenOutput {
 public:
  TokenOutput(std::filesystem::path path, int64_t vocab_size);
  void write(std::span<const uint32_t> tokens);
  /// Returns the number of tokens. Throws DataError for more than the format can count.
  int64_t commit();

 private:
  std::filesystem::path path_;
  bool wide_;
  OutputFile file_;
  std::array<int32_t, kLlmCHeaderBytes / sizeof(int32_t)> header_{};
  std::vector<uint16_t> narrow_;
  int64_t count_ = 0;
};

}  // namespace zero
