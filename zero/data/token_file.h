// Files of tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

class InputFile;
class MegatronIndex;

enum class TokenFormat : uint8_t {
  bytes,     ///< plain text: each byte is a token
  llm_c,     ///< llm.c's .bin: 256 int32 header words (magic 20240520, version 1, number of tokens,
             ///< zeros), then u16 tokens
  llm_c_32,  ///< the same with u32 tokens, magic 20240801 and version 7
  nano_gpt,  ///< nanoGPT's .bin: u16 tokens and nothing else
  megatron   ///< Megatron's .bin and .idx: Note [Megatron's files] in megatron.h
};

inline constexpr int32_t kLlmCMagic = 20240520;
inline constexpr int32_t kLlmCVersion = 1;
inline constexpr int32_t kLlmC32Magic = 20240801;
inline constexpr int32_t kLlmC32Version = 7;
inline constexpr size_t kLlmCHeaderBytes = 1024;

// Note [Marks of tokens]
// Beside a token file NAME.bin there may be NAME.marks.bin, with a byte for each token and nothing
// else. Training on answers alone reads there which tokens are to be predicted.
inline constexpr uint8_t kSupervised = 1;      ///< the token is to be predicted
inline constexpr uint8_t kBeginsDocument = 2;  ///< the token is the first of its document
inline constexpr uint8_t kSecondText = 4;      ///< the token is of the second text of a pair

/// Returns the path of the marks of a token file.
std::filesystem::path marks_of(std::filesystem::path tokens);
/// Returns the path of the labels of its documents: labelled_texts.h.
std::filesystem::path labels_of(std::filesystem::path tokens);

/// Returns "text by bytes", "llm.c tokens", "llm.c tokens of 32 bits", "nanoGPT tokens", "Megatron
/// tokens".
std::string_view name(TokenFormat format);

/// A read-only file of tokens: opening reads its header alone, and ranks of one host share its
/// pages in the system's cache.
class TokenFile {
 public:
  /// Opens `path`. Without `format`, an index of Megatron's beside a .bin decides, then llm.c's
  /// magic, then the extension: .bin is nanoGPT's format, anything else is text; files of other
  /// known formats are refused (foreign.h). DataError when the file is missing, empty, truncated,
  /// longer than its header or its index says, ends within a token, has a header of another kind,
  /// or is text with a NUL in its first MiB; where its marks are not as many as its tokens; for
  /// what MegatronIndex refuses; and for tokens of 16 bits beside a NAME.idx that is none of
  /// Megatron's.
  explicit TokenFile(const std::filesystem::path& path, std::optional<TokenFormat> format = {});
  ~TokenFile();

  const std::filesystem::path& path() const;
  TokenFormat format() const { return format_; }
  /// Returns the number of tokens.
  int64_t size() const { return size_; }
  /// Returns "Megatron tokens of 16 bits", or as name(TokenFormat).
  std::string_view contents() const;
  /// Returns the number of values a token of this file can take: 256, 32768, 65536, 2^31, 2^32 or
  /// 2^63 - 1.
  int64_t vocab_limit() const;

  /// Copies tokens [begin, begin + out.size()) to `out` and returns the largest. The range must lie
  /// within the file. Throws DataError when the file was truncated since it was opened, is text
  /// with a NUL there, or has a negative number there.
  int64_t read(int64_t begin, std::span<int64_t> out) const;

  /// Returns whether there is a file of marks, which may leave tokens out of the loss.
  bool marked() const { return marks_ != nullptr; }
  /// Returns whether something says where documents begin: marks, or an index.
  bool tells_documents() const { return marks_ != nullptr || index_ != nullptr; }
  /// Copies the marks of tokens [begin, begin + out.size()). Without a file of marks all tokens are
  /// supervised, and those that the index names begin documents. Throws DataError for a byte that
  /// is no mark, for an index that cannot be right, and as `read`.
  void read_marks(int64_t begin, std::span<uint8_t> out) const;

  /// Asks the system to bring a range into memory soon, without waiting.
  void will_need(int64_t begin, int64_t count) const;

 private:
  void open_marks();
  bool is_signed() const;

  std::unique_ptr<InputFile> file_;
  std::unique_ptr<InputFile> marks_;            // null: there are none
  std::unique_ptr<const MegatronIndex> index_;  // null: of other formats
  TokenFormat format_ = TokenFormat::bytes;
  int64_t token_bytes_ = 1;
  size_t header_ = 0;
  int64_t size_ = 0;
};

/// Holds the tokens of one file, or of several in their order, as one sequence.
class Tokens {
 public:
  /// Throws DataError for what TokenFile refuses, for files of several formats, and where some have
  /// marks.
  explicit Tokens(const std::vector<std::filesystem::path>& paths);

  /// Returns the files, for messages.
  std::string name() const;
  TokenFormat format() const { return files_.front()->format(); }
  size_t files() const { return files_.size(); }
  /// Returns the number of tokens.
  int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  /// See TokenFile.
  int64_t vocab_limit() const { return files_.front()->vocab_limit(); }
  int64_t read(int64_t begin, std::span<int64_t> out) const;
  bool marked() const { return files_.front()->marked(); }
  bool tells_documents() const { return files_.front()->tells_documents(); }
  void read_marks(int64_t begin, std::span<uint8_t> out) const;
  void will_need(int64_t begin, int64_t count) const;

 private:
  // Calls visit(file, begin in the file, count) for each file's part of a range.
  template <typename Visit>
  void visit(int64_t begin, int64_t count, const Visit& visit) const;

  std::vector<std::unique_ptr<const TokenFile>> files_;
  std::vector<int64_t> ends_;  // of each file, in the sequence
};

}  // namespace zero
