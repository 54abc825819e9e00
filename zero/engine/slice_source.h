// Where this rank's slice of a unit comes from when the unit is gathered: one class for each tier.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>

#include "zero/device/stream.h"
#include "zero/engine/late_updates.h"
#include "zero/engine/state_table.h"

namespace zero {

/// Called by one thread at a time for a given unit, and by several for different ones.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  /// Returns the slice for a gather of the unit: in memory of its own, or in `place`, which is its
  /// place in the gathered unit; a copy to `place` is enqueued on the current stream. Returns an
  /// undefined tensor where the slice is the whole unit, whose bytes come to `place` until `finish`
  /// returns. The memory lives until `release`.
  virtual at::Tensor bring(int64_t unit, const at::Tensor& place) = 0;
  /// Blocks until all bytes that `bring` started to read are in their place.
  virtual void finish(int64_t /*unit*/) {}
  /// The gather of the unit has ended or has thrown.
  virtual void release(int64_t /*unit*/) {}
  /// The unit will be gathered after those that were named before: begins to read its slice, if
  /// that takes time. Returns false where no more can be read ahead now. Never blocks.
  virtual bool read_ahead(int64_t /*unit*/) { return true; }
  /// Drops slices that were read ahead.
  virtual void forget() {}
  /// Blocks until no slice is read any more: they may be written.
  virtual void settle() {}
};

/// Slices in memory of the device.
class DeviceSlices final : public SliceSource {
 public:
  explicit DeviceSlices(StateTable& table) : table_(table) {}
  at::Tensor bring(int64_t unit, const at::Tensor& /*place*/) override {
    return table_.memory(unit, State::parameters);
  }

 private:
  StateTable& table_;
};

/// Slices in the host's memory.
///
/// Note [Parameters on the host]
/// A slice in host memory goes up to the device for each gather, to its place in the full unit,
/// where the group gathers the others'. The copy is enqueued before the gather; `settle` waits for
/// it, before the slice is written. A window that the ranks of a host share is memory of the host:
/// a device cannot read units in place there, so there is none.
class HostSlices final : public SliceSource {
 public:
  explicit HostSlices(StateTable& table) : table_(table) {}
  at::Tensor bring(int64_t unit, const at::Tensor& place) override {
    const auto& slice = table_.memory(unit, State::parameters);
    const std::lock_guard lock(mutex_);
    table_.link().up(place.data_ptr(), slice.const_data_ptr(), static_cast<int64_t>(slice.nbytes()),
                     sent_up_);
    return place;
  }
  void settle() override { sent_up_.wait_on_host(); }

 private:
  StateTable& table_;
  std::mutex mutex_;    // of the next one
  StreamMark sent_up_;  // behind the copies
};

}  // namespace zero
