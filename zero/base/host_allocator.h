// A caching, huge-page-aware allocator behind LibTorch's CPU tensors.
//
// LibTorch returns every large tensor's memory to the system and faults it in again page by page,
// which takes about a tenth of a training step on a CPU. This allocator keeps freed blocks and
// gives them out again.
//
// Note [Host blocks]
// Below 64 KiB a request goes to malloc, which is good at that. From there on a block is cut from
// one large range of addresses (Note [Host space] in host_space.h), whose freed parts stay mapped
// for the next request and merge with their neighbours. Memory that nobody uses is returned to the
// system when what is mapped would pass the peak of what was used by an eighth. The block's
// descriptor is apart from the block, found by its address, so that the DataPtr's context is the
// data itself: LibTorch asks that of raw_allocate and lazy clones.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// What the allocator holds, in bytes, for the whole process.
struct HostMemory {
  Usage used;      ///< blocks in use, rounded up to whole pages, but for those counted elsewhere
  Usage reserved;  ///< the huge pages that hold them, and those kept for the next blocks
  int64_t system_requests =
      0;  ///< requests that needed new memory of the operating system; constant in a steady state
};

/// Thread-safe. There is one, which is never destroyed, since tensors may outlive everything else.
class HostAllocator final : public c10::Allocator {
 public:
  static HostAllocator& instance();
  /// Blocks of so many bytes or more are cut from the host space and begin on a page.
  static constexpr size_t kPaged = size_t{64} << 10;

  /// `bytes` uninitialised bytes, at least 64-byte aligned, page-aligned from kPaged. Throws
  /// OutOfMemory where the machine has not as much memory.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  /// A block that outlives most others, and that its user counts in a ledger: not among
  /// HostMemory::used. Never redirected. Throws as `allocate`.
  void* take_charged(size_t bytes);
  /// Gives back what `take_charged` or `keep_charged` gave.
  void give_charged(void* data);
  /// Of the block behind `data`, which becomes empty, keeps the pages that its bytes [begin, end)
  /// touch, gives back the others, and returns where those begin; from now on they are counted as
  /// those of `take_charged`. Null, and nothing has changed, where the block is small or not of
  /// `allocate`. Nobody else uses the block.
  void* keep_charged(c10::DataPtr& data, size_t begin, size_t end);

  /// Throws the Error of its source where the block that begins at `data` may not hold any more
  /// what was put into it. Other blocks are memory.
  void check(void* data);

  HostMemory usage() const;
  /// usage().used.current, without a lock.
  int64_t used() const;
  /// Bytes of all blocks, charged or not.
  Usage held() const;
  /// Returns the memory that nobody uses to the system.
  void trim();
  /// Sets each peak to the current value.
  void reset_peaks();

  /// Every request is put to `limit` first, until it is removed (Note [Device memory]).
  void add_limit(DeviceLimit* limit);
  void remove_limit(DeviceLimit* limit);

 private:
  friend class BlockRedirect;
  HostAllocator();
  ~HostAllocator() override;
  static void release(void* data);
  void* take(size_t bytes, bool charged);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Where blocks of 64 KiB and more come from in place of the host space. Thread-safe.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// `bytes` on a page's border. Throws an Error where it has not as many.
  virtual void* take(size_t bytes) = 0;
  virtual void give(void* data) noexcept = 0;
  /// Throws an Error where what was put into the block may have been lost.
  virtual void check(void* data) = 0;
};

/// While it lives, large blocks that this thread allocates are `source`'s, which lives at least
/// until the last of them is freed. They are not among what `usage` counts. The innermost one
/// counts.
class BlockRedirect {
 public:
  explicit BlockRedirect(std::shared_ptr<BlockSource> source);
  ~BlockRedirect();
  BlockRedirect(const BlockRedirect&) = delete;
  BlockRedirect& operator=(const BlockRedirect&) = delete;

 private:
  std::shared_ptr<BlockSource> before_;
};

/// Makes HostAllocator LibTorch's CPU allocator, for the whole process; calling it again does
/// nothing. Tensors that exist keep their memory and its deleter. Call it before other threads
/// allocate. Throws ConfigError if an allocator of higher priority is installed.
void install_host_allocator();

}  // namespace zero
