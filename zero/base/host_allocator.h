// A caching, huge-page-aware allocator behind LibTorch's CPU tensors.
//
// LibTorch returns every large tensor's memory to the system and faults it in again page by page,
// which takes about a tenth of a training step on a CPU. This allocator keeps freed blocks and
// gives them out again.
//
// Note [Host blocks]
// A request below 64 KiB goes to malloc, which is good at small blocks. A larger block is cut from
// one large range of addresses (Note [Host space] in host_space.h). Freed parts of the range stay
// mapped for the next requests, and merge with their neighbours. Unused memory is returned to the
// system when the mapped memory would exceed the peak of the used memory by more than an eighth. A
// block's description is kept apart from the block and found by its address, so that the DataPtr's
// context is the data itself: LibTorch needs that for raw_allocate and lazy clones.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// The allocator's bytes, for the whole process.
struct HostMemory {
  Usage used;      ///< blocks in use, rounded up to whole pages, except those that ledgers count
  Usage reserved;  ///< the huge pages that hold them, and those kept for the next blocks
  int64_t system_requests =
      0;  ///< requests that needed new memory of the operating system; constant in a steady state
};

/// The allocator. Thread-safe. There is one object, which is never destroyed, since tensors may
/// outlive everything else.
class HostAllocator final : public c10::Allocator {
 public:
  static HostAllocator& instance();
  /// Blocks of this many bytes or more are cut from the host space and begin on a page.
  static constexpr size_t kPaged = size_t{64} << 10;

  /// Returns `bytes` uninitialised bytes, aligned to at least 64 bytes, and to a page from kPaged
  /// on. Throws OutOfMemory if the machine does not have enough memory.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  /// Returns a block that outlives most others. Its user counts it in a ledger, and
  /// HostMemory::used does not. It is never redirected. Throws as `allocate` does.
  void* take_charged(size_t bytes);
  /// Gives back a block of `take_charged` or `keep_charged`.
  void give_charged(void* data);
  /// Keeps the pages that bytes [begin, end) of the block behind `data` touch, gives the other
  /// pages back, empties `data`, and returns the address of the first kept page. From then on the
  /// pages count as a block of `take_charged`. Returns null, and changes nothing, if the block is
  /// small or not from `allocate`. Nobody else may use the block.
  void* keep_charged(c10::DataPtr& data, size_t begin, size_t end);

  /// Throws the error of the block's source if the block that begins at `data` may have lost data.
  /// Blocks without a source are memory, and lose nothing.
  void check(void* data);

  HostMemory usage() const;
  /// Returns usage().used.current, without a lock.
  int64_t used() const;
  /// Returns the bytes of all blocks, charged or not.
  Usage held() const;
  /// Returns unused memory to the system.
  void trim();
  /// Sets each peak to the current value.
  void reset_peaks();

  /// Asks `limit` before each allocation, until the limit is removed (Note [Device memory]).
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

/// Gives blocks of 64 KiB and more in place of the host space. Thread-safe.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// Returns `bytes` bytes that begin on a page. Throws an Error if it does not have as many.
  virtual void* take(size_t bytes) = 0;
  virtual void give(void* data) noexcept = 0;
  /// Throws an Error if data in the block may have been lost.
  virtual void check(void* data) = 0;
};

/// While a redirect lives, large blocks that this thread allocates come from `source`. The source
/// lives at least until the last of them is freed. `usage` does not count them. If redirects are
/// nested, the innermost one is in force.
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
