// Memory that all ranks of one host can read: one memfd, a region of it for each rank.
//
// Note [Arena]
// The file is anonymous (memfd_create), so the kernel frees it with the last process that holds it,
// however the job ends, and it does not count against /dev/shm, which containers keep tiny. It is
// sparse: every rank's region is far larger than the machine's memory, and only allocated blocks
// have pages. A rank allocates from its own region with its own allocator, which lives in its
// private memory: ranks share no lock, so a rank that dies anywhere blocks nobody. A block's pages
// are reserved when it is allocated (fallocate), so exhaustion is an exception there and not a bus
// error later, and are given back when it is freed (FALLOC_FL_PUNCH_HOLE); so a fresh block reads
// as zeros.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/memory_limit.h"
#include "zero/base/memory_mapping.h"
#include "zero/base/owner_process.h"
#include "zero/base/range_heap.h"

namespace zero::comm {

/// Where things lie in the file: [control | region of rank 0 | ... | region of rank N-1]. The
/// control region ends with the bytes that each rank is about to take (Note [Pending memory]).
struct ArenaLayout {
  int64_t control_bytes = 0;
  int64_t region_bytes = 0;
  int ranks = 0;

  /// Regions of about a power of two of at least twice the physical memory, as long as all of them
  /// fit in 8 TiB; see Note [Regions are not aligned to each other].
  static ArenaLayout choose(int ranks, int64_t control_bytes, int64_t physical_bytes);
  int64_t region_offset(int rank) const { return control_bytes + region_bytes * rank; }
  int64_t total_bytes() const { return region_offset(ranks); }
  /// Whether `choose` could have returned it for as many bytes of control.
  bool valid(int64_t least_control_bytes) const;
  /// Whether `bytes` bytes at `offset` lie in the regions of the ranks [first, last).
  bool holds(int64_t offset, int64_t bytes, int first, int last) const;
};

/// The file, mapped. Ranks that are threads of one process share one Mapping.
class Mapping {
 public:
  /// Makes the file, with the control region reserved and zero. Throws OutOfMemory.
  static std::shared_ptr<Mapping> create(const ArenaLayout& layout);
  /// Maps a file that another process made with `create`. Throws CommError where the file is none
  /// of that layout, or could still change its size; OutOfMemory.
  static std::shared_ptr<Mapping> open(Descriptor file, const ArenaLayout& layout);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const ArenaLayout& layout() const { return layout_; }
  int file() const { return file_.get(); }
  std::byte* at(int64_t offset) const { return memory_.data() + offset; }
  /// The bytes that `rank` has been granted and has not taken yet.
  std::atomic_ref<int64_t> pending(int rank) const;
  /// The id of the `which`-th limit (below kMemoryLimits) of that rank's memory, 0 where there is
  /// none.
  std::atomic_ref<int64_t> limit_id(int rank, size_t which) const;
  /// The place in the file of `bytes` bytes at `address`, or -1 where they do not lie in the ranks'
  /// regions.
  int64_t offset_of(const void* address, int64_t bytes) const;

 private:
  Mapping(Descriptor file, const ArenaLayout& layout);
  Descriptor file_;
  ArenaLayout layout_;
  MemoryMapping memory_;
};

/// Bytes of the file as this rank alone sees them: what it writes stays with it (copy on write, by
/// page of 4 KiB).
class PrivateView {
 public:
  /// Throws OutOfMemory.
  PrivateView(const Mapping& mapping, int64_t offset, int64_t bytes);
  std::byte* data() const { return memory_.data(); }
  /// Gives the written pages up: the file shows through again.
  void discard();

 private:
  MemoryMapping memory_;
};

/// This rank's region: an allocator of blocks of 4 KiB granularity, best fit (range_heap.h).
/// Blocks of 2 MiB or more start on a multiple of it and are made of huge pages where the kernel
/// agrees. Thread-safe.
class Arena {
 public:
  static constexpr auto kGranularity = static_cast<int64_t>(MemoryMapping::kPage);
  /// `number`: what the rank is in the job, for messages; none: the same. `limits` says what is
  /// left of the memory; tests give another.
  Arena(
      std::shared_ptr<Mapping> mapping, int rank, std::optional<int> number = {},
      std::function<std::vector<MemoryLimit>()> limits = [] { return memory_limits(); });
  /// A zero-filled block's place in the file. `bytes` > 0. Throws OutOfMemory, also where there is
  /// room for it but not for what the other ranks are taking meanwhile.
  int64_t allocate(int64_t bytes);
  /// Gives back a block that `allocate` returned. In a child that the rank has forked it does
  /// nothing: the block is the rank's still.
  void free(int64_t offset) noexcept;
  /// Bytes of the blocks now allocated, rounded up to whole pages.
  int64_t allocated_bytes() const;
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

 private:
  class Grant;
  std::shared_ptr<Mapping> mapping_;
  int rank_;
  int number_;
  std::function<std::vector<MemoryLimit>()> limits_;
  OwnerProcess owner_;
  mutable std::mutex mutex_;
  RangeHeap heap_;  // of the offsets in the file
};

/// Bytes of this machine's memory.
int64_t physical_memory();

}  // namespace zero::comm
