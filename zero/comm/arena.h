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

/// The file's layout: [control | region of rank 0 | ... | region of rank N-1]. The control region
/// ends with the counters of Note [Pending memory].
struct ArenaLayout {
  int64_t control_bytes = 0;
  int64_t region_bytes = 0;
  int ranks = 0;

  /// Chooses regions of about a power of two bytes, at least twice the physical memory, as long as
  /// all of them fit in 8 TiB; see Note [Regions are not aligned to each other].
  static ArenaLayout choose(int ranks, int64_t control_bytes, int64_t physical_bytes);
  int64_t region_offset(int rank) const { return control_bytes + region_bytes * rank; }
  int64_t total_bytes() const { return region_offset(ranks); }
  /// Returns true if `choose` could have returned this layout for `least_control_bytes` bytes of
  /// control or more.
  bool valid(int64_t least_control_bytes) const;
  /// Returns true if `bytes` bytes at `offset` lie in the regions of the ranks [first, last).
  bool holds(int64_t offset, int64_t bytes, int first, int last) const;
};

/// The mapped file. Ranks that are threads of one process share one Mapping.
class Mapping {
 public:
  /// Makes the file, with the control region reserved and zero. Throws OutOfMemory.
  static std::shared_ptr<Mapping> create(const ArenaLayout& layout);
  /// Maps a file that another process made with `create`. Throws CommError if the file does not
  /// have that layout, or could still change its size; throws OutOfMemory.
  static std::shared_ptr<Mapping> open(Descriptor file, const ArenaLayout& layout);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const ArenaLayout& layout() const { return layout_; }
  int file() const { return file_.get(); }
  std::byte* at(int64_t offset) const { return memory_.data() + offset; }
  /// The bytes that `rank` is about to take: they were granted, and their pages are not there yet.
  std::atomic_ref<int64_t> pending(int rank) const;
  /// The id of the `which`-th limit (below kMemoryLimits) of that rank's memory, or 0.
  std::atomic_ref<int64_t> limit_id(int rank, size_t which) const;
  /// Returns the place of `address` in the file, or -1 if the bytes are not in the ranks' regions.
  int64_t offset_of(const void* address, int64_t bytes) const;

 private:
  Mapping(Descriptor file, const ArenaLayout& layout);
  Descriptor file_;
  ArenaLayout layout_;
  MemoryMapping memory_;
};

/// A copy-on-write view of bytes of the file: nobody else sees this rank's writes there, and a page
/// of 4 KiB that it wrote to no longer follows the file.
class PrivateView {
 public:
  /// Throws OutOfMemory.
  PrivateView(const Mapping& mapping, int64_t offset, int64_t bytes);
  std::byte* data() const { return memory_.data(); }
  /// Gives the written pages up; the view shows the file again.
  void discard();

 private:
  MemoryMapping memory_;
};

/// Allocates from this rank's region in blocks of 4 KiB granularity, best fit (range_heap.h).
/// Blocks of 2 MiB or more start on a multiple of 2 MiB and are made of huge pages if the kernel
/// agrees. Thread-safe.
class Arena {
 public:
  static constexpr auto kGranularity = static_cast<int64_t>(MemoryMapping::kPage);
  /// `number` is the rank's in its job, for messages; without it, `rank`. `limits` says how much
  /// memory is left; tests give their own.
  Arena(
      std::shared_ptr<Mapping> mapping, int rank, std::optional<int> number = {},
      std::function<std::vector<MemoryLimit>()> limits = [] { return memory_limits(); });
  /// Returns the place in the file of a new zero-filled block. `bytes` > 0. Throws OutOfMemory,
  /// also if there is room for the block but not for the blocks that other ranks are taking
  /// meanwhile.
  int64_t allocate(int64_t bytes);
  /// Gives back a block that `allocate` returned. In a child that the rank has forked it does
  /// nothing: the block still belongs to the rank.
  void free(int64_t offset) noexcept;
  /// Returns the bytes of the blocks now allocated, rounded up to whole pages.
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
  RangeHeap heap_;  // offsets in the file
};

/// Returns the bytes of this machine's memory.
int64_t physical_memory();

}  // namespace zero::comm
