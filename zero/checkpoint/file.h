// Files that are whole or absent, and files that are read by position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/hash.h"
#include "zero/base/owner_process.h"

namespace zero {

/// Throws an exception of the caller's kind with the message given: &fail<CheckpointError>,
/// &fail<DataError>.
using Fail = void (*)(const std::string& message);

template <typename Exception>
[[noreturn]] void fail(const std::string& message) {
  throw Exception(message);
}

/// The bytes of a file, and the checksum of each block of kSummedBlock of them (the last may be
/// shorter).
struct FileSums {
  uint64_t bytes = 0;
  std::vector<uint64_t> blocks;
  bool operator==(const FileSums&) const = default;
};
inline constexpr size_t kSummedBlock = size_t{1} << 20;

/// A file that appears under its name only when it is complete and on the disk: it is written under
/// a temporary name in the same folder, synced, and renamed, and then the folder is synced. Every
/// failure, a full disk and a limit on files (ulimit -f) among them, is reported with the path and
/// the system's reason. Destroyed before `commit`, it leaves nothing behind. One thread at a time.
///
/// Note [Files past the page cache]
/// Full buffers go to the disk by O_DIRECT, where the file system has it. A write through the page
/// cache takes several times as much of a processor, which training needs, and pushes out of memory
/// what others have there.
class OutputFile {
 public:
  /// Creates the temporary file; an existing file at `path` stays as it is until `commit`.
  OutputFile(std::filesystem::path path, Fail fail);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Appends `size` bytes, by a buffer of 4 MiB.
  void write(const void* data, size_t size);
  /// Writes `size` bytes at `offset`, over what is there or beyond the end, unbuffered.
  void write_at(uint64_t offset, const void* data, size_t size);
  /// The end of what was written so far, where `write` appends.
  uint64_t size() const { return size_; }
  void commit();
  /// Returns its checksums, where it was written by `write` alone. After `commit`.
  const FileSums& sums() const { return sums_; }

 private:
  void sum(const std::byte* data, size_t size);
  void flush();
  void put(uint64_t offset, const std::byte* data, size_t size);
  void set_direct(bool direct);
  [[noreturn]] void report(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Fail fail_;
  OwnerProcess owner_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
  size_t buffered_ = 0;
  bool direct_ = false;        // writes pass the page cache by
  bool may_be_direct_ = true;  // the file system has not refused it
  std::unique_ptr<std::byte, decltype(&std::free)> buffer_;
  FileSums sums_;
  PieceHash block_;  // the last one, of which sums_.bytes says how much there is
};

/// Makes the entries of `folder` (creations, renames) durable.
void sync_folder(const std::filesystem::path& folder, Fail fail);

/// A regular file that is read by position: one that shrinks or fails meanwhile is an error, where
/// a mapping would end the process by SIGBUS. Any number of threads.
class InputFile {
 public:
  InputFile(std::filesystem::path path, Fail fail);

  const std::filesystem::path& path() const { return path_; }
  /// Bytes, when it was opened.
  uint64_t size() const { return size_; }
  /// Reads bytes [offset, offset + size), which must lie within the file.
  void read_at(uint64_t offset, void* data, size_t size) const;
  /// Asks the system to read a range soon, without waiting.
  void will_need(uint64_t offset, uint64_t size) const;

 private:
  std::filesystem::path path_;
  Fail fail_;
  Descriptor descriptor_;
  uint64_t size_ = 0;
};

/// Returns all bytes of a regular file.
std::string read_file(const std::filesystem::path& path, Fail fail);
/// Writes a file by an OutputFile.
void write_file(const std::filesystem::path& path, std::string_view bytes, Fail fail);
/// Copies those of the named files that are in folder `from` to folder `to`, where they replace
/// others.
void copy_files(const std::filesystem::path& from, const std::filesystem::path& to,
                std::span<const std::string_view> names, Fail fail);

}  // namespace zero
