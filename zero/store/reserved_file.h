// One file on one disk, of a size that is reserved before the first byte is written.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "zero/base/owner_process.h"

namespace zero::store {

/// Bytes since construction.
struct FileCounts {
  int64_t read = 0;
  int64_t written = 0;
};

/// How bytes that are reserved will be used.
enum class Use : uint8_t {
  written,  ///< by calls that tell what fails
  mapped,   ///< in memory, where a full disk is a signal that kills
};

/// Reserves bytes [offset, offset + bytes) of an open file on its disk. The file, which is at least
/// `offset` long, grows to hold them. Where the file system cannot reserve, it grows alone, or, to
/// be mapped, is written. Throws StoreError naming `what` they are for, the reason and the remedy;
/// where the disk is too full, also the bytes needed and there.
void reserve(int file, int64_t offset, int64_t bytes, const std::string& what,
             Use use = Use::written);

class ReservedFile {
 public:
  /// Makes `path`, replacing a file that is there; `direct` is past the page cache where the file
  /// system can. Throws StoreError naming the path, the reason and the remedy; where the disk is
  /// too full, also the bytes needed and there. Nothing is left of a file that could not be made.
  ReservedFile(std::string path, int64_t bytes, bool direct);
  /// Removes it.
  ~ReservedFile();
  ReservedFile(const ReservedFile&) = delete;
  ReservedFile& operator=(const ReservedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }

  void count(int64_t bytes, bool write) {
    (write ? written_ : read_).fetch_add(bytes, std::memory_order_relaxed);
  }
  FileCounts counts() const { return {.read = read_, .written = written_}; }

 private:
  std::string path_;
  int64_t bytes_ = 0;
  OwnerProcess owner_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::atomic<int64_t> read_{0};
  std::atomic<int64_t> written_{0};
};

}  // namespace zero::store
