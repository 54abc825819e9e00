// Files that are whole or absent, and files that are read through memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "zero/base/owner_process.h"

namespace zero {

/// Throws an exception of the caller's kind with the message given: &fail<CheckpointError>,
/// &fail<DataError>.
using Fail = void (*)(const std::string& message);

template <typename Exception>
[[noreturn]] void fail(const std::string& message) {
  throw Exception(message);
}

/// A file that appears under its name only when it is complete and on the disk: it is written under
/// a temporary name in the same folder, synced, and renamed, and then the folder is synced. Every
/// failure, a full disk and a limit on files (ulimit -f) among them, is reported with the path and
/// the system's reason. Destroyed
/// before `commit`, it leaves nothing behind. One thread at a time.
class OutputFile {
 public:
  /// Creates the temporary file; an existing file at `path` stays as it is until `commit`.
  OutputFile(std::filesystem::path path, Fail fail);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Appends `size` bytes. Small pieces are gathered in a buffer of 1 MiB; large ones go straight
  /// to the file.
  void write(const void* data, size_t size);
  /// Writes `size` bytes at `offset`, over what is there or beyond the end, unbuffered.
  void write_at(uint64_t offset, const void* data, size_t size);
  /// The end of what was written so far, where `write` appends.
  uint64_t size() const { return size_; }
  void commit();

 private:
  void flush();
  void put(uint64_t offset, const std::byte* data, size_t size);
  [[noreturn]] void report(const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Fail fail_;
  OwnerProcess owner_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
  size_t buffered_ = 0;
  std::unique_ptr<std::byte[]> buffer_;
};

/// Makes the entries of `folder` (creations, renames) durable.
void sync_folder(const std::filesystem::path& folder, Fail fail);

/// A regular file mapped read-only. The mapping lives as long as the object; the file must not
/// shrink meanwhile.
class MappedFile {
 public:
  MappedFile(const std::filesystem::path& path, Fail fail);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  /// Asks the system to read a range soon, without waiting.
  void will_need(size_t offset, size_t size) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace zero
