// A caching, huge-page-aware allocator behind LibTorch's CPU tensors.
//
// LibTorch returns every large tensor's memory to the system and faults it in again page by page,
// which takes about a tenth of a training step on a CPU. This allocator keeps freed blocks and
// gives them out again.
//
// Note [Host blocks]
// Below 64 KiB a request goes to malloc, which is good at that. From there on a block is a mapping
// of its own, of a size class: 8 classes to each power of two, so that rounding wastes at most 12.5
// %. From 2 MiB on a block starts on a huge page's border and asks for huge pages. A freed block
// goes to its class's list, and the next request of the class takes it. Sizes that come and go
// would pile up there, so cached blocks are returned to the system, longest unused first, when
// reserved memory would pass twice the peak of used memory. The block's descriptor is apart from
// the block, found by its address, so that the DataPtr's context is the data itself: LibTorch asks
// that of raw_allocate and lazy clones.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// What the allocator holds, in bytes, for the whole process.
struct HostMemory {
  Usage used;      ///< blocks in use, as large as their size class
  Usage reserved;  ///< used and cached blocks
  int64_t system_requests =
      0;  ///< mappings asked of the operating system so far; constant in a steady state
};

/// Thread-safe. There is one, which is never destroyed, since tensors may outlive everything else.
class HostAllocator final : public c10::Allocator {
 public:
  static HostAllocator& instance();

  /// `bytes` uninitialised bytes, at least 64-byte aligned; page-aligned from 64 KiB and 2
  /// MiB-aligned from 2 MiB. When the system refuses, returns the cached blocks to it and tries
  /// again, then throws OutOfMemory.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  HostMemory usage() const;
  /// Returns every cached block to the system.
  void trim();
  /// Sets each peak to the current value.
  void reset_peaks();

 private:
  HostAllocator();
  ~HostAllocator() override;
  static void release(void* data);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes HostAllocator LibTorch's CPU allocator, for the whole process; calling it again does
/// nothing. Tensors that exist keep their memory and its deleter. Call it before other threads
/// allocate. Throws ConfigError if an allocator of higher priority is installed.
void install_host_allocator();

/// The size class of a request of `bytes` bytes, at least 64 KiB: the smallest k * 2^e with k
/// in 8..15 that is no smaller.
size_t host_size_class(size_t bytes);

}  // namespace zero
