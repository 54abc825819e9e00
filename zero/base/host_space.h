// A range of addresses from which large blocks are cut: the heap of the host allocator.
//
// Note [Host space]
// The range is far larger than the machine's memory and costs nothing until it is touched. So a
// large block always finds room, however the used blocks lie. Holes cannot make an allocation fail;
// they only keep memory resident that nobody uses. A block is cut from the hole that fits best
// (range_heap.h). Blocks that outlive most others are cut from the high end of the touched
// addresses, so that they leave no holes between those that come and go. Touched addresses stay
// resident, by huge pages, so that the next step finds its memory mapped. If resident memory
// exceeds a limit, the largest holes give theirs back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zero/base/memory_mapping.h"
#include "zero/base/range_heap.h"

namespace zero {

/// The bookkeeping and the pages of such a range. Not thread-safe.
class HostSpace {
 public:
  static constexpr size_t kPage = MemoryMapping::kPage;
  static constexpr size_t kHugePage = MemoryMapping::kHugePage;

  /// Reserves addresses for four times the machine's memory, or for as much as a limit on address
  /// space allows.
  HostSpace();

  /// Returns a block of `bytes`, rounded up to pages, on a page's border; null if more memory would
  /// be in use than the machine ever has. Memory that was resident may hold old values. A `lasting`
  /// block outlives most others.
  void* take(size_t bytes, bool lasting = false);
  /// Returns the size of the block that begins at `data`, or 0 if there is none.
  size_t size_of(void* data) const;
  bool contains(const void* data) const {
    return data >= mapping_.data() && data < mapping_.data() + mapping_.bytes();
  }
  /// Gives a block back; its memory stays resident.
  void give(void* data);
  /// Gives back the pages of a block that its bytes [begin, end) do not touch. Returns the block's
  /// new begin.
  void* keep(void* data, size_t begin, size_t end);

  /// Gives unused memory back to the system until at most `bytes` are resident.
  void limit_resident(size_t bytes);

  size_t used() const { return heap_.used(); }
  /// Returns the bytes of whole huge pages that have been touched and not given back.
  size_t resident() const { return resident_; }
  /// Returns how often `take` needed memory that was not resident.
  int64_t system_requests() const { return system_requests_; }

 private:
  size_t offset_of(const void* data) const;
  bool touch(size_t begin, size_t bytes);
  void release(size_t begin, size_t bytes, size_t most);

  MemoryMapping mapping_;
  RangeHeap heap_;                    // offsets in the mapping
  size_t machine_ = 0;                // bytes of memory and swap
  std::vector<bool> resident_pages_;  // by huge page of the range
  size_t resident_end_ = 0;           // end of the last resident page
  size_t resident_ = 0;
  int64_t system_requests_ = 0;
};

}  // namespace zero
