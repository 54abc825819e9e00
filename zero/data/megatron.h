// The index of tokens that Megatron wrote.
//
// Note [Megatron's files]
// NAME.bin has the tokens of all sequences, and nothing else. NAME.idx has, little-endian and
// without gaps: the nine bytes "MMIDIDX\0\0"; the version, 1 (8 bytes); a code of the tokens' type
// (1 byte); the number of sequences S (8); the number D of entries of the last array (8), which is
// one more than there are documents; the tokens of each sequence (S times 4); the byte of NAME.bin
// at which each begins (S times 8); and the sequence with which each document begins, and S at the
// end (D times 8). Data of several modes have another byte for each sequence behind it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

namespace zero {

class InputFile;

class MegatronIndex {
 public:
  /// Returns NAME.idx of NAME.bin.
  static std::filesystem::path path_of(std::filesystem::path tokens);
  /// Returns whether `path` is there and begins as an index does. Throws DataError if it begins as
  /// an index that Megatron wrote formerly, or cannot be read.
  static bool is_index(const std::filesystem::path& path);

  /// Reads the header, and the last entry of each array. `tokens` has `bytes` bytes. Throws
  /// DataError for another version, for tokens that are no whole numbers of 8 (unsigned), 16, 32 or
  /// 64 bits, for data of several modes, where either file is shorter or longer than the other
  /// says, and for an index without tokens.
  MegatronIndex(const std::filesystem::path& path, const std::filesystem::path& tokens,
                uint64_t bytes);
  ~MegatronIndex();

  /// Returns the bytes of a token: 1, 2, 4 or 8.
  int64_t token_bytes() const { return type_->bytes; }
  /// Returns whether tokens are signed numbers. Negative ones are no tokens.
  bool is_signed() const { return type_->is_signed; }
  /// Returns "Megatron tokens of 16 bits".
  std::string_view name() const { return type_->name; }

  /// Adds kBeginsDocument to the marks of tokens [begin, begin + marks.size()) that begin one. The
  /// index is searched in the file. Throws DataError for an entry that cannot be right.
  void mark_documents(int64_t begin, std::span<uint8_t> marks) const;

 private:
  struct Type {
    uint8_t code;
    int64_t bytes;
    bool is_signed;
    std::string_view name;
  };
  static const Type kTypes[];

  int64_t entry(uint64_t offset) const;
  // Returns the first token of a document, or the number of tokens.
  int64_t beginning(int64_t document) const;

  std::unique_ptr<InputFile> file_;
  const Type* type_ = nullptr;
  int64_t sequences_ = 0;
  int64_t documents_ = 0;
  int64_t tokens_ = 0;
  uint64_t pointers_ = 0;  // where the array begins in the file
  uint64_t begins_ = 0;    // the same of the documents' first sequences
};

}  // namespace zero
