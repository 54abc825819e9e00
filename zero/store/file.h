// A file of states, on one disk or striped over several. Its space is reserved in full. It is read
// and written asynchronously in blocks, past the page cache if the file system can do that.
//
// Note [Direct transfers]
// States are read once and written once a step: the page cache would only copy them, and take the
// memory that offloading is to free. So the file is opened with O_DIRECT, which requires offsets,
// sizes and addresses that are multiples of the device's block; kAlignment suits all devices. On
// file systems without O_DIRECT (tmpfs), reads and writes are ordinary ones. io_uring keeps many
// blocks under way with one system call. If the system refuses it (containers often do), threads
// call pread and pwrite.
//
// Note [Checksums]
// A disk that loses a write, tears one at a power cut or flips a bit would change weights that
// nobody looks at. So the checksum of each page (4 bytes for 4096) is put into memory when its
// write starts. It is compared when a thread waits for a read of the page, in that thread: the
// thread is about to use the page, and meanwhile the disk goes on with the next transfers.
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
  int64_t block_bytes = 1 << 20;  ///< bytes of one piece of a transfer; DeepSpeed's aio.block_size
  int queue_depth = 32;   ///< pieces under way at a time on a disk; DeepSpeed's aio.queue_depth
  bool uring = true;      ///< false: threads are used, even if io_uring works
  bool direct = true;     ///< false: transfers go through the page cache
  bool checksums = true;  ///< false: pages from the disk are not checked
  /// If set, this makes the queue, given its depth, instead of io_uring or threads: for a store of
  /// another kind, or one that fails.
  std::function<std::unique_ptr<Queue>(int)> queue = {};
  std::shared_ptr<Timeline> timeline = {};  ///< if set, it records the transfers
};

class File;

/// Tells who checks the pages of a transfer. With `here` the transfer does: a read checks them when
/// it is waited for. With `by_caller` the caller does: it calls File::verify before it uses pages
/// that were read, and File::record before it starts to write pages.
enum class Checks : uint8_t { here, by_caller };

/// A read or write under way. It can be moved but not copied, and must not outlive its File. Its
/// memory must live, and must not be touched (a read) or changed (a write), until `wait` has
/// returned or thrown. Any one thread may wait for it. The destructor waits. If nobody waited for a
/// write and it failed, every later operation on the file throws that error.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();
  /// Throws a StoreError that names the file and the offset, with the system's reason or with the
  /// page that differs from the one that was written. A second call, or a call on an empty
  /// Transfer, returns at once.
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
  /// Makes the file `path` (replacing one that is there) and reserves `bytes` bytes, rounded up to
  /// kAlignment, on the disk. Throws a StoreError that names the path and the remedy; if the disk
  /// is too full, it also names the bytes that are needed and those that are free. The destructor
  /// removes the file.
  File(std::string path, int64_t bytes, const FileOptions& options = {});
  /// Does the same over several files, which are best on as many disks. Blocks of
  /// `options.block_bytes` are dealt to them in proportion to `shares`, which `measure_speeds` can
  /// give; if `shares` is empty, all are equal. Throws a ConfigError that names a share that cannot
  /// be used.
  File(const std::vector<std::string>& paths, const std::vector<double>& shares, int64_t bytes,
       const FileOptions& options = {});
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Starts to read `bytes` bytes at `offset` into `to`. All three are multiples of kAlignment, and
  /// the bytes lie in the file. Bytes that were never written read as zeros. Transfers run in any
  /// order: before bytes that are being written are read, the caller must wait for the write, and
  /// the other way round. Several threads may start transfers. Throws StoreError if an earlier
  /// write was lost. `unit` is the unit that a timeline shows for the transfer.
  Transfer read(int64_t offset, void* to, int64_t bytes, Checks checks = Checks::here,
                int64_t unit = -1);
  /// Starts to write `bytes` bytes from `from` at `offset`; everything else is as in `read`.
  Transfer write(int64_t offset, const void* from, int64_t bytes, Checks checks = Checks::here,
                 int64_t unit = -1);
  /// These are for Checks::by_caller; they are called with a page or more that is in a cache.
  /// `verify` throws StoreError if the bytes that were read are not those that were written.
  /// `record` stores the checksums of bytes that will be written. Without checksums they do
  /// nothing. Several threads may call them at once for different pages.
  void verify(int64_t offset, const std::byte* memory, int64_t bytes) const;
  void record(int64_t offset, const std::byte* memory, int64_t bytes);

  /// Returns the path of the first file.
  const std::string& path() const { return files_.front()->path(); }
  int64_t bytes() const { return bytes_; }
  FileCounts counts() const;
  /// Returns a text for logs: "io_uring, direct", "threads, buffered", ...
  std::string way() const;
  /// Returns the size of the table of checksums, which is in memory and in no ledger; 0 without
  /// checksums.
  int64_t checksum_bytes() const { return checksums_.table_bytes(); }
  /// Returns the files on disk, each with its path, its size and its counts.
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
  std::mutex mutex_;       // guards what_lost_
  std::string what_lost_;  // error of the first failed write that nobody waited for
  std::unique_ptr<Queue> queue_;
  OwnerProcess owner_;
};

}  // namespace zero::store
