#include "zero/data/megatron.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/token_file.h"

namespace zero {
namespace {

using std::string_view_literals::operator""sv;

namespace fs = std::filesystem;

constexpr auto kMagic = "MMIDIDX\0\0"sv;
constexpr auto kFormerMagic = "TNTIDX\0\0"sv;
constexpr uint64_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 34;

template <typename Number>
Number number_at(std::string_view bytes, size_t offset) {
  Number number;
  std::memcpy(&number, bytes.data() + offset, sizeof number);
  return number;
}

}  // namespace

const MegatronIndex::Type MegatronIndex::kTypes[] = {
    {1, 1, false, "Megatron tokens of 8 bits"},
    {3, 2, true, "Megatron tokens of 16 bits (signed)"},
    {4, 4, true, "Megatron tokens of 32 bits"},
    {5, 8, true, "Megatron tokens of 64 bits"},
    {8, 2, false, "Megatron tokens of 16 bits"},
};

fs::path MegatronIndex::path_of(fs::path tokens) { return tokens.replace_extension(".idx"); }

bool MegatronIndex::is_index(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return false;
  const InputFile file(path, &fail<DataError>);
  std::string head(std::min<uint64_t>(file.size(), kMagic.size()), '\0');
  file.read_at(0, head.data(), head.size());
  if (head.starts_with(kFormerMagic)) {
    throw DataError(fmt::format(
        "{} is an index as Megatron wrote it formerly (it begins with TNTIDX), which is not read. "
        "Write the data again with a Megatron whose index begins with MMIDIDX.",
        path.string()));
  }
  return head == kMagic;
}

MegatronIndex::MegatronIndex(const fs::path& path, const fs::path& tokens, uint64_t bytes)
    : file_(std::make_unique<InputFile>(path, &fail<DataError>)) {
  const auto refuse = [&]<typename... Values>(fmt::format_string<Values...> why,
                                              Values&&... values) {
    throw DataError(
        fmt::format("{} {}", path.string(), fmt::format(why, std::forward<Values>(values)...)));
  };
  if (file_->size() < kHeaderBytes) {
    refuse("is truncated: it has {} bytes, and the header of Megatron's index alone has {}.",
           file_->size(), kHeaderBytes);
  }
  std::string header(kHeaderBytes, '\0');
  file_->read_at(0, header.data(), header.size());
  const auto version = number_at<uint64_t>(header, 9);
  if (!header.starts_with(kMagic) || version != kVersion)
    refuse("is an index of version {}; only Megatron's version {} is read.", version, kVersion);
  const auto code = number_at<uint8_t>(header, 17);
  const auto* type = std::ranges::find(kTypes, code, &Type::code);
  if (type == std::end(kTypes)) {
    refuse(
        "says that the tokens are of the type {}{}; those of 1 (8 bits, unsigned), 3 and 8 (16), 4 "
        "(32) and 5 (64) are read. Write the data as one of these.",
        code,
        code == 2                ? " (8 bits, signed)"
        : code == 6 || code == 7 ? " (floating point)"
                                 : "");
  }
  type_ = type;
  const auto sequences = number_at<uint64_t>(header, 18);
  const auto documents = number_at<uint64_t>(header, 26);
  // A number that is too large for the file might give sums of products beyond 64 bits.
  const bool fits = sequences <= file_->size() / 12 && documents <= file_->size() / 8;
  const uint64_t expected = fits ? kHeaderBytes + 12 * sequences + 8 * documents : 0;
  if (fits && sequences > 0 && file_->size() == expected + sequences) {
    refuse(
        "is of data of several modes (a byte for each of its {} sequences follows the index), "
        "which are not read. Write the tokens of the text alone.",
        sequences);
  }
  if (file_->size() != expected) {
    refuse("is {}: its header promises {} sequences and {} ends of documents, and it has {} bytes.",
           !fits || file_->size() < expected ? "truncated" : "damaged", sequences, documents,
           file_->size());
  }
  if (sequences == 0 || documents < 2) refuse("holds no documents.");
  sequences_ = static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(documents) - 1;
  pointers_ = kHeaderBytes + 4 * sequences;
  begins_ = pointers_ + 8 * sequences;

  int32_t last_length = 0;
  file_->read_at(pointers_ - sizeof last_length, &last_length, sizeof last_length);
  const int64_t last = entry(begins_ - 8);
  const auto size = static_cast<int64_t>(bytes);
  const int64_t width = token_bytes();
  if (last_length < 0 || last < 0 || last > (INT64_MAX >> 1) || last % width != 0)
    refuse("is damaged: its last sequence has {} tokens from byte {} on.", last_length, last);
  const int64_t end = last + last_length * width;
  if (end != size) {
    throw DataError(fmt::format("{} is {}: its index {} promises {} bytes, and it has {}.",
                                tokens.string(), end > size ? "truncated" : "damaged",
                                path.string(), end, size));
  }
  tokens_ = size / width;
  if (tokens_ == 0) refuse("holds no tokens.");
  const int64_t first = entry(begins_);
  const int64_t after = entry(file_->size() - 8);
  if (first != 0 || after != sequences_) {
    refuse(
        "is damaged: its documents begin with sequence {} and end at {}, and it has {} "
        "sequences.",
        first, after, sequences_);
  }
}

MegatronIndex::~MegatronIndex() = default;

int64_t MegatronIndex::entry(uint64_t offset) const {
  int64_t value = 0;
  file_->read_at(offset, &value, sizeof value);
  return value;
}

int64_t MegatronIndex::beginning(int64_t document) const {
  const auto wrong = [&](const char* what, int64_t value) {
    throw DataError(fmt::format("{} is damaged: document {} begins with {} {}.",
                                file_->path().string(), document, what, value));
  };
  const int64_t sequence = entry(begins_ + 8 * static_cast<uint64_t>(document));
  if (sequence < 0 || sequence > sequences_) wrong("sequence", sequence);
  if (sequence == sequences_) return tokens_;
  const int64_t byte = entry(pointers_ + 8 * static_cast<uint64_t>(sequence));
  if (byte < 0 || byte % token_bytes() != 0 || byte / token_bytes() > tokens_) wrong("byte", byte);
  return byte / token_bytes();
}

void MegatronIndex::mark_documents(int64_t begin, std::span<uint8_t> marks) const {
  int64_t document = 0;
  for (int64_t after = documents_; document < after;) {  // the first that does not begin before
    const int64_t middle = document + (after - document) / 2;
    if (beginning(middle) < begin) {
      document = middle + 1;
    } else {
      after = middle;
    }
  }
  for (int64_t before = begin; document < documents_; ++document) {
    const int64_t token = beginning(document);
    if (token < before) {
      throw DataError(fmt::format("{} is damaged: document {} begins before the one before it.",
                                  file_->path().string(), document));
    }
    if (token - begin >= std::ssize(marks)) return;
    marks[static_cast<size_t>(token - begin)] |= kBeginsDocument;
    before = token;
  }
}

}  // namespace zero
