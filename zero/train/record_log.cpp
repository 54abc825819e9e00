#include "zero/train/record_log.h"

#include <algorithm>

#include "zero/base/crc.h"
#include "zero/train/protobuf.h"

namespace zero::train {
namespace {

constexpr size_t kBlock = 32768;
constexpr size_t kHeader = 7;  // of a record

enum Kind : char { full = 1, first = 2, middle = 3, last = 4 };

/// Bytes to the end of the block; what is too short for a record is left as zeros.
size_t left_in_block(uint64_t position) { return kBlock - position % kBlock; }

}  // namespace

void append_record(std::string& out, uint64_t begin, std::string_view message) {
  for (bool begins = true; begins || !message.empty();) {
    const size_t left = left_in_block(begin + out.size());
    if (left < kHeader) {
      out.append(left, '\0');
      continue;
    }
    const auto piece = message.substr(0, left - kHeader);
    message.remove_prefix(piece.size());
    const bool ends = message.empty();
    const size_t record = out.size();
    out.append(kHeader - 1, '\0');
    out.push_back(begins ? (ends ? full : first) : (ends ? last : middle));
    out += piece;
    const uint32_t check = crc32(std::string_view(out).substr(record + kHeader - 1));
    std::string header;  // short enough to need no memory
    protobuf::append_little_endian(header, check, 4);
    protobuf::append_little_endian(header, piece.size(), 2);
    out.replace(record, header.size(), header);
    begins = false;
  }
}

std::optional<std::string> RecordReader::next() {
  std::string message;
  bool begun = false;
  for (size_t position = end_;;) {
    if (const size_t left = left_in_block(position); left < kHeader) position += left;
    if (position + kHeader > file_.size()) return std::nullopt;
    const auto header = file_.substr(position, kHeader);
    const size_t length = protobuf::read_little_endian(header.substr(4, 2));
    if (position + kHeader + length > file_.size()) return std::nullopt;
    const auto checked = file_.substr(position + kHeader - 1, 1 + length);
    if (protobuf::read_little_endian(header.substr(0, 4)) != crc32(checked)) return std::nullopt;
    const char kind = checked.front();
    const bool begins = kind == full || kind == first;
    if (begins == begun || kind < full || kind > last) return std::nullopt;
    begun = true;
    message += checked.substr(1);
    position += kHeader + length;
    if (kind == first || kind == middle) continue;
    end_ = position;
    return message;
  }
}

}  // namespace zero::train
