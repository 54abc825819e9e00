#include "zero/checkpoint/foreign/zip.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero::foreign {
namespace {

constexpr std::string_view kEnd = "PK\5\6";
constexpr std::string_view kEnd64 = "PK\6\6";
constexpr std::string_view kLocator64 = "PK\6\7";
constexpr std::string_view kEntry = "PK\1\2";
constexpr std::string_view kLocal = "PK\3\4";
constexpr size_t kEndBytes = 22;
constexpr size_t kEntryBytes = 46;
constexpr size_t kLocalBytes = 30;
constexpr uint64_t kMostDirectory = uint64_t{1} << 30;

[[noreturn]] void refuse_zip(const std::string& why) { throw CheckpointError(why); }

// Reads little-endian numbers of a record.
template <class Number>
Number at(std::string_view record, size_t offset) {
  Number value{};
  if (record.size() < sizeof value || offset > record.size() - sizeof value)
    refuse_zip("a record of the zip directory is cut off");
  std::memcpy(&value, record.data() + offset, sizeof value);
  return value;
}

class ZipReader {
 public:
  ZipReader(const InputFile& file, uint64_t begin, uint64_t size)
      : file_(file), begin_(begin), size_(size) {}

  std::map<std::string, ZipEntry> read() {
    find_directory();
    if (directory_ > size_ || bytes_ > size_ - directory_)
      refuse_zip(fmt::format("the zip directory lies at [{}, {}) of {} bytes", directory_,
                             directory_ + bytes_, size_));
    if (bytes_ > kMostDirectory) refuse_zip(fmt::format("the zip directory has {} bytes", bytes_));
    const auto directory = piece(directory_, bytes_);
    std::map<std::string, ZipEntry> entries;
    size_t position = 0;
    for (uint64_t i = 0; i < count_; ++i) position += add(directory, position, entries);
    return entries;
  }

 private:
  std::string piece(uint64_t offset, uint64_t size) const {
    if (offset > size_ || size > size_ - offset)
      refuse_zip(fmt::format("bytes [{}, {}) are wanted of {}: the file is truncated", offset,
                             offset + size, size_));
    std::string bytes(size, '\0');
    file_.read_at(begin_ + offset, bytes.data(), size);
    return bytes;
  }

  // Finds the directory by the end record, which is the last thing in the archive, except for a
  // comment of up to 64 KiB.
  void find_directory() {
    const uint64_t tail = std::min<uint64_t>(size_, kEndBytes + 0xFFFF);
    const auto bytes = piece(size_ - tail, tail);
    const auto found = bytes.rfind(kEnd);
    if (found == std::string::npos || bytes.size() - found < kEndBytes)
      refuse_zip("it has no end of a zip directory: the file is truncated, or is not a zip file");
    const auto end = std::string_view(bytes).substr(found);
    count_ = at<uint16_t>(end, 10);
    bytes_ = at<uint32_t>(end, 12);
    directory_ = at<uint32_t>(end, 16);
    const uint64_t end_at = size_ - tail + found;
    constexpr size_t kLocatorBytes = 20;
    if (end_at < kLocatorBytes) return;
    const auto locator = piece(end_at - kLocatorBytes, kLocatorBytes);
    if (!locator.starts_with(kLocator64)) return;
    const auto end64 = piece(at<uint64_t>(locator, 8), 56);
    if (!end64.starts_with(kEnd64)) refuse_zip("the zip64 end record is not where it should be");
    count_ = at<uint64_t>(end64, 32);
    bytes_ = at<uint64_t>(end64, 40);
    directory_ = at<uint64_t>(end64, 48);
  }

  // Adds the entry at a position of the directory, and returns its bytes.
  size_t add(std::string_view directory, size_t position,
             std::map<std::string, ZipEntry>& entries) const {
    const auto record = directory.substr(std::min(position, directory.size()));
    if (record.size() < kEntryBytes || !record.starts_with(kEntry))
      refuse_zip(fmt::format("the zip directory has no entry at its byte {}", position));
    const size_t name_bytes = at<uint16_t>(record, 28);
    const size_t extra_bytes = at<uint16_t>(record, 30);
    const size_t total = kEntryBytes + name_bytes + extra_bytes + at<uint16_t>(record, 32);
    if (record.size() < total) refuse_zip("the last entry of the zip directory is cut off");
    const std::string name(record.substr(kEntryBytes, name_bytes));
    ZipEntry entry{0, at<uint32_t>(record, 24), at<uint32_t>(record, 16)};
    uint64_t packed = at<uint32_t>(record, 20);
    uint64_t local = at<uint32_t>(record, 42);
    read_wide(record.substr(kEntryBytes + name_bytes, extra_bytes), entry.size, packed, local);
    if ((at<uint16_t>(record, 8) & 1U) != 0 || at<uint16_t>(record, 10) != 0 ||
        packed != entry.size)
      refuse_zip(
          fmt::format("the entry '{}' is compressed or encrypted; torch.save stores entries "
                      "as they are",
                      excerpt(name)));
    const auto header = piece(local, kLocalBytes);
    if (!header.starts_with(kLocal))
      refuse_zip(fmt::format("the entry '{}' has no header at byte {}", excerpt(name), local));
    entry.offset = local + kLocalBytes + at<uint16_t>(header, 26) + at<uint16_t>(header, 28);
    if (entry.offset > directory_ || entry.size > directory_ - entry.offset)
      refuse_zip(
          fmt::format("the entry '{}' of {} bytes from byte {} on does not end before the "
                      "directory at {}",
                      excerpt(name), entry.size, entry.offset, directory_));
    entry.offset += begin_;
    if (!entries.emplace(name, entry).second)
      refuse_zip(fmt::format("two entries are named '{}'", excerpt(name)));
    return total;
  }

  // Reads numbers that do not fit into 32 bits. They are in the extra field of kind 1, in this
  // order.
  static void read_wide(std::string_view extra, uint64_t& size, uint64_t& packed, uint64_t& local) {
    while (extra.size() >= 4) {
      const size_t bytes = at<uint16_t>(extra, 2);
      if (bytes > extra.size() - 4) return;
      if (at<uint16_t>(extra, 0) == 1) {
        auto wide = extra.substr(4, bytes);
        for (auto* number : {&size, &packed, &local}) {
          if (*number != 0xFFFFFFFF) continue;
          *number = at<uint64_t>(wide, 0);
          wide.remove_prefix(sizeof *number);
        }
      }
      extra.remove_prefix(4 + bytes);
    }
  }

  const InputFile& file_;
  uint64_t begin_;
  uint64_t size_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
  uint64_t directory_ = 0;
};

// Tables that serve eight bytes at once: entry [k][b] is the CRC of byte b followed by k zero
// bytes.
constexpr auto kCrcTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
    tables[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (size_t k = 1; k < 8; ++k)
      tables[k][b] = (tables[k - 1][b] >> 8U) ^ tables[0][tables[k - 1][b] & 0xFFU];
  }
  return tables;
}();

}  // namespace

std::map<std::string, ZipEntry> read_zip_directory(const InputFile& file, uint64_t begin,
                                                   uint64_t size) {
  return ZipReader(file, begin, size).read();
}

uint32_t crc32_of(const void* data, size_t size, uint32_t before) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, bytes += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kCrcTables[7 - k][(word >> (8 * k)) & 0xFFU];
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8U) ^ kCrcTables[0][(crc ^ *bytes) & 0xFFU];
  return ~crc;
}

}  // namespace zero::foreign
