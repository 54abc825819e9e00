// A file of states on disk: reserved in full, read and written asynchronously in blocks, past the
// page cache where the file system can; on one disk, or striped over several.
//
// Note [Direct transfers]
// States are read once and written once a step: the page cache would only copy them, and take the
// memory that offloading is to free. So the file is opened with O_DIRECT, which wants offsets,
// sizes and memory that are multiples of the device's block; kAlignment suits them all. File
// systems without it (tmpfs) get ordinary reads and writes. io_uring has many blocks under way with
// one system call; where it is refused (containers often do), threads call pread and pwrite.
//
// Note [Checksums]
// A disk that loses a write, tears one at a power cut or flips a bit would change weights that
// nobody looks at. So the checksum of each page is kept in memory (4 bytes for 4096) when its write
// starts, and compared when a read of it is waited for, in the thread that waits: the page is about
// to be used there, and the disk goes on meanwhile with the transfers behind it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/base/owner_process.h"
#include "zero/base/timeline.h"
#include "zero/store/checksums.h"
#include "zero/store/queue.h"
#include "zero/store/reserved_file.h"
#include "zero/store/stripes.h"

namespace zero::store {

struct FileOptions {
  int64_t block_bytes = 1 << 20;  ///< of one piece of a transfer; DeepSpeed's aio.block_size
  int queue_depth = 32;   ///< pieces under way at a time on a disk; DeepSpeed's aio.queue_depth
  bool uring = true;      ///< false: threads, even where io_uring works
  bool direct = true;     ///< false: through the page cache
  bool checksums = true;  ///< false: what the disk returns is believed
  /// Makes the queue, given its depth, in place of the system's ways: a store of another kind, or
  /// one that fails.
  std::function<std::unique_ptr<Queue>(int)> queue = {};
  std::shared_ptr<Timeline> timeline = {};  ///< of whoever wants to see transfers
};

class File;

/// Tells who checks the pages of a transfer. `here`: the transfer does, for a read when it is
/// waited for. `by_caller`: its user does, by File::verify before it uses them, and by File::record
/// before it starts to write them.
enum class Checks : uint8_t { here, by_caller };

/// A read or write under way. Move-only; must not outlive its File. The memory must live, and must
/// not be touched (a read) or changed (a write), until `wait` has returned or thrown. Any one
/// thread may wait for it. Destroying it waits; what a write that nobody waited for could not write
/// is an error of every later operation on the file.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();
  /// Throws StoreError naming the file, the offset and the system's reason, or the page that is not
  /// what was written. A second call, or one on an empty Transfer, returns at once.
  void wait();
  bool done() const;

 private:
  friend class File;
  void drop();
  void show(const Request& request) const;
  File* file_ = nullptr;
  std::shared_ptr<Request> request_;
  int64_t offset_ = 0;
  const std::byte* memory_ = nullptr;
  int64_t bytes_ = 0;
  bool write_ = false;
  Checks checks_ = Checks::here;
  int64_t unit_ = -1;
};

class File {
 public:
  /// Makes `path` (replacing a file that is there), with `bytes` (rounded up to kAlignment)
  /// reserved on the disk. Throws StoreError naming the path and the remedy; where the disk is too
  /// full, also the bytes needed and there. The file is removed at the end.
  File(std::string path, int64_t bytes, const FileOptions& options = {});
  /// Does so over several files, best on as many disks: blocks of `options.block_bytes` are dealt
  /// to them in proportion to `shares` (such as `measure_speeds` gives; none: equal). Throws
  /// ConfigError naming a share that is no share.
  File(const std::vector<std::string>& paths, const std::vector<double>& shares, int64_t bytes,
       const FileOptions& options = {});
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Starts to read `bytes` at `offset` into `to`; all three are multiples of kAlignment, within
  /// the file. What was never written reads as zeros. Transfers run in any order: a read of what is
  /// being written must wait for the write first, and a write of what is being read for the read.
  /// Several threads may start transfers. Throws StoreError where an earlier write was lost.
  /// A timeline names the `unit` that is moved.
  Transfer read(int64_t offset, void* to, int64_t bytes, Checks checks = Checks::here,
                int64_t unit = -1);
  Transfer write(int64_t offset, const void* from, int64_t bytes, Checks checks = Checks::here,
                 int64_t unit = -1);
  /// Checks::by_caller, a page or more at a time while it is in a cache: throws StoreError where
  /// what was read is not what was written; counts what will be written. Without checksums they do
  /// nothing. Threads may call them at once for different pages.
  void verify(int64_t offset, const std::byte* memory, int64_t bytes) const;
  void record(int64_t offset, const std::byte* memory, int64_t bytes);

  /// Returns the path of the first file.
  const std::string& path() const { return files_.front()->path(); }
  int64_t bytes() const { return bytes_; }
  FileCounts counts() const;
  /// Returns, for logs, "io_uring, direct", "threads, buffered", ...
  std::string way() const;
  /// The table of checksums, in memory and in no ledger; 0 without checksums.
  int64_t checksum_bytes() const { return checksums_.table_bytes(); }
  /// Each file on disk, with its path, its size and its counts.
  const std::vector<std::unique_ptr<ReservedFile>>& files() const { return files_; }

 private:
  friend class Transfer;
  Transfer start(int64_t offset, std::byte* memory, int64_t bytes, bool write, Checks checks,
                 int64_t unit);
  std::string failure(const Request& request, bool write) const;
  void lose(const std::string& failure);

  int64_t bytes_ = 0;
  FileOptions options_;
  Stripes stripes_;
  std::vector<std::unique_ptr<ReservedFile>> files_;
  Checksums checksums_;
  std::atomic<bool> lost_{false};
  std::mutex mutex_;       // of what follows
  std::string what_lost_;  // the first write that nobody waited for and that failed
  std::unique_ptr<Queue> queue_;
  OwnerProcess owner_;
};

}  // namespace zero::store
