// A file on one disk whose space is reserved before the first byte is written.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "zero/base/owner_process.h"

namespace zero::store {

/// Bytes that were read and written since construction.
struct FileCounts {
  int64_t read = 0;
  int64_t written = 0;
};

/// Says how reserved bytes will be used.
enum class Use : uint8_t {
  written,  ///< by calls that report an error
  mapped,   ///< in memory, where a full disk ends the process by a signal
};

/// Reserves bytes [offset, offset + bytes) of an open file on its disk. The file must be at least
/// `offset` bytes long, and grows to hold them. If the file system cannot reserve, the file only
/// grows, or, if it is to be mapped, is filled by writing. Throws a StoreError that names `what`
/// (the use of the bytes), the reason and the remedy; if the disk is too full, it also names the
/// bytes that are needed and those that are free.
void reserve(int file, int64_t offset, int64_t bytes, const std::string& what,
             Use use = Use::written);

class ReservedFile {
 public:
  /// Makes the file `path`, replacing one that is there. With `direct` its transfers pass by the
  /// page cache if the file system can do that. Throws a StoreError that names the path, the reason
  /// and the remedy; if the disk is too full, it also names the bytes that are needed and those
  /// that are free. If it throws, no file is left.
  ReservedFile(std::string path, int64_t bytes, bool direct);
  /// Removes the file.
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
