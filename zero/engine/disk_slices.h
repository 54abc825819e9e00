// Slices on a disk.
//
// Note [Parameters on disk]
// A slice on disk comes through two levels (ZeRO-Infinity, 2104.07857, section 6.1): every rank
// reads its own slice, 1/N of the unit, so the disks of all hosts work for each unit; then the
// group gathers. The pager names the gathers to come (`expect`), so that the reads run ahead of the
// gathers, and the gathers ahead of the operators. A rank that is alone reads straight to where the
// unit is wanted, where that is memory of the host; a device gets the slice from a buffer, as in
// Note [Parameters on the host].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/slice_source.h"
#include "zero/partition/layout.h"
#include "zero/store/file.h"

namespace zero {

/// Reads slices to buffers, ahead of their gathers.
class BufferedSlices final : public SliceSource {
 public:
  struct Options {
    /// Bytes of slices that are read ahead of their gather; a larger slice is read ahead alone.
    int64_t ahead_bytes = 0;
    /// Bytes of an ordinary unit's slice at most.
    int64_t slice_bytes = 0;
  };
  /// All outlive this.
  BufferedSlices(const partition::Layout& layout, StateTable& table, comm::Group& group,
                 LateUpdates& updates, Options options);

  at::Tensor bring(int64_t unit, const at::Tensor& place) override;
  void release(int64_t unit) override;
  bool read_ahead(int64_t unit) override;
  void forget() override;

 private:
  struct Buffer {
    at::Tensor memory;
    StreamMark sent;  // behind the copy to the device of the last slice in it
  };
  struct Read {
    Buffer buffer;
    store::Transfer transfer;
  };
  // With the mutex held:
  void start(int64_t unit);
  void leave_ahead(int64_t unit);
  Buffer take_buffer(int64_t bytes);

  const partition::Layout& layout_;
  StateTable& table_;
  comm::Group& group_;
  LateUpdates& updates_;
  Options options_;
  std::mutex mutex_;             // of what follows
  std::vector<Read> reads_;      // by unit
  std::list<int64_t> ahead_;     // units that are read and not gathered yet, oldest first
  int64_t ahead_bytes_ = 0;      // of those
  std::vector<Buffer> buffers_;  // that no slice is in
};

/// Reads the slices of a rank that is alone, which are whole units, to where they are wanted.
class DirectSlices final : public SliceSource {
 public:
  /// All outlive this.
  DirectSlices(const partition::Layout& layout, StateTable& table, LateUpdates& updates);

  at::Tensor bring(int64_t unit, const at::Tensor& place) override;
  void finish(int64_t unit) override;
  void release(int64_t unit) override;
  bool read_ahead(int64_t /*unit*/) override { return false; }

 private:
  StateTable& table_;
  LateUpdates& updates_;
  std::vector<store::Transfer> transfers_;  // by unit
};

}  // namespace zero
