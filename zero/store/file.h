// A file of states on disk: reserved in full, read and written asynchronously in blocks, past the
// page cache where the file system can.
//
// Note [Direct transfers]
// States are read once and written once a step: the page cache would only copy them, and take the
// memory that offloading is to free. So the file is opened with O_DIRECT, which wants offsets,
// sizes and memory that are multiples of the device's block; kAlignment suits them all. File
// systems without it (tmpfs) get ordinary reads and writes. io_uring has many blocks under way with
// one system call; where it is refused (containers often do), threads call pread and pwrite.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "zero/store/queue.h"

namespace zero::store {

/// Of offsets in the file, sizes and memory, in bytes.
inline constexpr int64_t kAlignment = 4096;

struct FileOptions {
  int64_t block_bytes = 1 << 20;  ///< of one piece of a transfer; DeepSpeed's aio.block_size
  int queue_depth = 32;           ///< pieces under way at a time; DeepSpeed's aio.queue_depth
  bool uring = true;              ///< false: threads, even where io_uring works
  bool direct = true;             ///< false: through the page cache
};

/// Bytes since construction.
struct FileCounts {
  int64_t read = 0;
  int64_t written = 0;
};

class File;

/// A read or write under way. Move-only; must not outlive its File. The memory must live, and must
/// not be touched (a read) or changed (a write), until `wait` has returned or thrown. Destroying it
/// waits.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();
  /// Throws StoreError naming the file, the offset and the system's reason. A second call, or one
  /// on an empty Transfer, returns at once.
  void wait();
  bool done() const;

 private:
  friend class File;
  Transfer(File& file, std::shared_ptr<Request> request, bool write)
      : file_(&file), request_(std::move(request)), write_(write) {}
  File* file_ = nullptr;
  std::shared_ptr<Request> request_;
  bool write_ = false;
};

class File {
 public:
  /// Makes `path` (replacing a file that is there), with `bytes` (rounded up to kAlignment)
  /// reserved on the disk. Throws StoreError naming the path and the remedy; where the disk is too
  /// full, also the bytes needed and there. The file is removed at the end.
  File(std::string path, int64_t bytes, const FileOptions& options = {});
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Starts to read `bytes` at `offset` into `to`; all three are multiples of kAlignment, within
  /// the file. What was never written reads as zeros. Transfers run in any order: a read of what is
  /// being written must wait for the write first.
  Transfer read(int64_t offset, void* to, int64_t bytes);
  Transfer write(int64_t offset, const void* from, int64_t bytes);

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }
  FileCounts counts() const { return counts_; }
  /// For logs: "io_uring, direct", "threads, buffered", ...
  std::string way() const;

 private:
  friend class Transfer;
  Transfer start(int64_t offset, std::byte* memory, int64_t bytes, bool write);

  std::string path_;
  int64_t bytes_ = 0;
  FileOptions options_;
  int file_ = -1;
  bool direct_ = false;
  FileCounts counts_;
  std::unique_ptr<Queue> queue_;
};

}  // namespace zero::store
