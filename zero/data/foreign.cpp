#include "zero/data/foreign.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

using std::string_view_literals::operator""sv;

constexpr const char* kDecompress = "Decompress it first.";
constexpr const char* kExtract = "Extract the text files in it and give those.";
constexpr const char* kTable = "Write its column of text to a UTF-8 file and give that.";
constexpr const char* kDocument = "Convert it to plain text first.";
constexpr const char* kNoText = "Give text, or tokens made from it.";
constexpr const char* kTokens =
    "Token numbers of 16 bits without a header are read from a file named .bin.";
constexpr const char* kWeights = "Weights are no data to train on.";
constexpr const char* kUtf8 =
    "Convert it to UTF-8 first: iconv -f UTF-16 -t UTF-8 (or UTF-32) IN > OUT.";

struct Signature {
  size_t offset;
  std::string_view bytes;
  const char* name;
  const char* remedy;
};

// The longer first, where one begins like another. Text begins with none of them.
constexpr Signature kSignatures[] = {
    {0, "\x1F\x8B\x08"sv, "a gzip file", kDecompress},
    {0, "\x28\xB5\x2F\xFD"sv, "a zstd file", kDecompress},
    {0,
     "\xFD"
     "7zXZ\0"sv,
     "an xz file", kDecompress},
    {4, "1AY&SY"sv, "a bzip2 file", kDecompress},
    {0, "\x04\x22\x4D\x18"sv, "an lz4 file", kDecompress},
    {0, "PK\x03\x04"sv, "a zip archive (or what is kept in one: .npz, .pt, .docx)", kExtract},
    {0, "7z\xBC\xAF\x27\x1C"sv, "a 7z archive", kExtract},
    {0, "Rar!\x1A\x07"sv, "a rar archive", kExtract},
    {257, "ustar"sv, "a tar archive", kExtract},
    {0, "PAR1\x15"sv, "a parquet table", kTable},
    {0, "ARROW1\0\0"sv, "an Arrow table", kTable},
    {0, "Obj\x01"sv, "an Avro table", kTable},
    {0, "SQLite format 3\0"sv, "an SQLite database", kTable},
    {0, "\x89HDF\r\n\x1A\n"sv, "an HDF5 file", kTable},
    {0, "%PDF-"sv, "a PDF document", kDocument},
    {0, "\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"sv, "an Office document", kDocument},
    {0, "\x89PNG\r\n\x1A\n"sv, "a PNG picture", kNoText},
    {0, "\xFF\xD8\xFF"sv, "a JPEG picture", kNoText},
    {0, "GIF89a"sv, "a GIF picture", kNoText},
    {0,
     "\x7F"
     "ELF"sv,
     "a program (ELF)", kNoText},
    {0, "\x93NUMPY"sv, "a numpy array", kTokens},
    {0, "\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9"sv, "a file of torch.save", kWeights},
    {0, "\x80\x02"sv, "a Python pickle", kTokens},
    {0, "\x80\x03"sv, "a Python pickle", kTokens},
    {0, "\x80\x04\x95"sv, "a Python pickle", kTokens},
    {0, "\x80\x05\x95"sv, "a Python pickle", kTokens},
    {0, "GGUF\x01\0\0\0"sv, "a GGUF model", kWeights},
    {0, "GGUF\x02\0\0\0"sv, "a GGUF model", kWeights},
    {0, "GGUF\x03\0\0\0"sv, "a GGUF model", kWeights},
    {0, "\xC6\xD7\x34\x01"sv, "a model of llm.c", kWeights},
    {0, "\xC7\xD7\x34\x01"sv, "a debug state of llm.c", kWeights},
    {0, "\xC8\xD7\x34\x01"sv, "a tokenizer of llm.c", kNoText},
    {0, "\x88\xD8\x34\x01"sv, "a file of llm.c tokens",
     "It is prepared already: `zero train --data` takes it."},
    {0, "MMIDIDX\0\0"sv, "the index of Megatron tokens", "Give the .bin beside it."},
    {0, "\x8A\xD8\x34\x01"sv, "an evaluation file of llm.c", kNoText},
    {0, "\xA1\xD9\x34\x01"sv, "a file of llm.c tokens of 32 bits",
     "It is prepared already: `zero train --data` takes it."},
    {0, "\xFF\xFE\0\0"sv, "text in UTF-32", kUtf8},
    {0, "\0\0\xFE\xFF"sv, "text in UTF-32", kUtf8},
    {0, "\xFF\xFE"sv, "text in UTF-16", kUtf8},
    {0, "\xFE\xFF"sv, "text in UTF-16", kUtf8},
};

bool begins(std::string_view head, size_t offset, std::string_view bytes) {
  return head.size() >= offset && head.substr(offset, bytes.size()) == bytes;
}

// The format begins with a length that the file can hold, and an object with a name in it.
bool is_safetensors(std::string_view head, uint64_t size) {
  uint64_t length = 0;
  if (head.size() < sizeof length + 2) return false;
  std::memcpy(&length, head.data(), sizeof length);
  return length <= size - sizeof length && begins(head, sizeof length, "{\"");
}

// The format is a message whose first field is the first piece: its text, then its score, an fp32
// (tag 0x15).
bool is_sentencepiece(std::string_view head) {
  if (head.size() < 16 || head[0] != 0x0A || head[2] != 0x0A) return false;
  const auto message = static_cast<unsigned char>(head[1]);
  const auto piece = static_cast<unsigned char>(head[3]);
  return message < 0x80 && piece + 2U + 5U <= message && begins(head, 4U + piece, "\x15"sv);
}

}  // namespace

void refuse_foreign(const InputFile& file, bool binary) {
  std::string head(std::min<uint64_t>(file.size(), 512), '\0');
  file.read_at(0, head.data(), head.size());
  const auto refuse = [&](std::string_view name, std::string_view remedy) {
    throw DataError(fmt::format("{} is {}, not text{}. {}", file.path().string(), name,
                                binary ? " or tokens" : "", remedy));
  };
  for (const auto& signature : kSignatures) {
    if (binary && signature.bytes.size() < 4) continue;
    if (begins(head, signature.offset, signature.bytes)) refuse(signature.name, signature.remedy);
  }
  if (is_safetensors(head, file.size())) refuse("a safetensors file", kWeights);
  if (is_sentencepiece(head))
    refuse("a sentencepiece model", "Give it to `zero data prepare` as --tokenizer.");
}

void refuse_nul(const InputFile& file, std::string_view text, uint64_t offset) {
  const auto found = text.find('\0');
  if (found == std::string_view::npos) return;
  throw DataError(fmt::format(
      "{} is not text: its byte {} is NUL. Text in UTF-16 must be converted (iconv -f UTF-16 -t "
      "UTF-8); token numbers of 16 bits are read from a file named .bin.",
      file.path().string(), offset + found));
}

}  // namespace zero
