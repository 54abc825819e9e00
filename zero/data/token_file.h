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

enum class TokenFormat : uint8_t {
  bytes,     ///< plain text: each byte is a token
  llm_c,     ///< llm.c's .bin: 256 int32 header words (magic 20240520, version 1, number of tokens,
             ///< zeros), then u16 tokens
  llm_c_32,  ///< the same with u32 tokens, magic 20240801 and version 7
  nano_gpt   ///< nanoGPT's .bin: u16 tokens and nothing else
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

/// Returns "text by bytes", "llm.c tokens", "llm.c tokens of 32 bits", "nanoGPT tokens".
std::string_view name(TokenFormat format);
/// Returns the bytes of a token: 1, 2 or 4.
int64_t token_bytes(TokenFormat format);

/// A read-only file of tokens: opening reads its header alone, and ranks of one host share its
/// pages in the system's cache.
class TokenFile {
 public:
  /// Opens `path`. Without `format`, llm.c's magic decides, then the extension: .bin is nanoGPT's
  /// format, anything else is text; files of other known formats are refused (foreign.h). DataError
  /// when the file is missing, empty, truncated, longer than its header says, ends within a token,
  /// has a header of another kind, or is text with a NUL in its first MiB; and where its marks are
  /// not as many as its tokens.
  explicit TokenFile(const std::filesystem::path& path, std::optional<TokenFormat> format = {});
  ~TokenFile();

  const std::filesystem::path& path() const;
  TokenFormat format() const { return format_; }
  /// Returns the number of tokens.
  int64_t size() const { return size_; }
  /// Returns the number of values a token of this format can take: 256, 65536 or 2^32.
  int64_t vocab_limit() const { return int64_t{1} << (8 * token_bytes(format_)); }

  /// Copies tokens [begin, begin + out.size()) to `out` and returns the largest. The range must lie
  /// within the file. Throws DataError when the file was truncated since it was opened, or is text
  /// with a NUL there.
  int64_t read(int64_t begin, std::span<int64_t> out) const;

  /// Returns whether there are marks of the tokens.
  bool marked() const { return marks_ != nullptr; }
  /// Copies the marks of tokens [begin, begin + out.size()), which are there. Throws DataError for
  /// a byte that is no mark, and as `read`.
  void read_marks(int64_t begin, std::span<uint8_t> out) const;

  /// Asks the system to bring a range into memory soon, without waiting.
  void will_need(int64_t begin, int64_t count) const;

 private:
  void open_marks();

  std::unique_ptr<InputFile> file_;
  std::unique_ptr<InputFile> marks_;  // null: there are none
  TokenFormat format_ = TokenFormat::bytes;
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
