// The log format of LevelDB (its doc/log_format.md) as Weights & Biases has it: messages in
// records, none of which crosses a boundary of 32 KiB. A record is a CRC of its kind and its bytes
// (zlib's, unmasked, where LevelDB has a masked CRC-32C), the number of these, the kind, the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zero::train {

/// Appends a message to `out`, which begins at byte `begin` of the file.
void append_record(std::string& out, uint64_t begin, std::string_view message);

/// The messages of a file.
class RecordReader {
 public:
  /// `file` outlives this; its records begin at byte `begin`.
  RecordReader(std::string_view file, size_t begin) : file_(file), end_(begin) {}

  /// None at the end, and where there is no whole message.
  std::optional<std::string> next();
  /// Where the last message ends.
  size_t end() const { return end_; }

 private:
  std::string_view file_;
  size_t end_;
};

}  // namespace zero::train
