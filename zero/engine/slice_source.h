// Sources of this rank's slice of a unit when the unit is gathered: one class for memory and
// one for a disk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/comm/group.h"
#include "zero/engine/pending_updates.h"
#include "zero/engine/state_table.h"
#include "zero/partition/layout.h"

namespace zero {

/// Called by one thread at a time for a given unit, and by several for different ones. The update
/// of a unit has been completed before its slice is brought.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  /// Returns the slice for a gather of the unit, in memory of its own or in `place`, which is its
  /// place in the gathered unit; a copy to `place` is enqueued on the current stream. If the slice
  /// is the whole unit, it returns an undefined tensor, and the bytes are in `place` when `finish`
  /// returns. The memory lives until `release`.
  virtual at::Tensor bring(int64_t unit, const at::Tensor& place) = 0;
  /// Blocks until all bytes that `bring` started to read are in their place.
  virtual void finish(int64_t /*unit*/) {}
  /// The gather of the unit has ended or has thrown.
  virtual void release(int64_t /*unit*/) {}
  /// The unit will be gathered after those that were named before. Begins to read its slice, if
  /// that takes time. Returns false if no more can be read ahead now. Never blocks.
  virtual bool read_ahead(int64_t /*unit*/) { return true; }
  /// Drops slices that were read ahead.
  virtual void forget() {}
  /// Blocks until no slice is being read any more, so that slices may be written.
  virtual void settle() {}
};

/// How far slices on a disk are read ahead.
struct DiskReads {
  /// Bytes of slices that are read ahead of their gather; a larger slice is read ahead alone.
  int64_t ahead_bytes = 0;
  /// The bytes of an ordinary unit's slice at most.
  int64_t slice_bytes = 0;
};

// The arguments outlive the source.
std::unique_ptr<SliceSource> memory_slices(StateTable& table);
/// A slice is read ahead only after its unit's update among `updates`.
std::unique_ptr<SliceSource> disk_slices(StateTable& table, PendingUpdates& updates,
                                         DiskReads reads);

}  // namespace zero
