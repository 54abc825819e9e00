// Slices in memory of the device or of its host.
//
// Note [Parameters on the host]
// A slice in host memory goes up to the device for each gather, to its place in the full unit,
// where the group then gathers the other slices. The copy is enqueued before the gather; `settle`
// waits for it, before the slice is written. A window that the ranks of a host share is memory of
// the host, and a device cannot read units in place there. So a device has no window.
#include <mutex>

#include "zero/device/stream.h"
#include "zero/engine/slice_source.h"

namespace zero {

namespace {

class MemorySlices final : public SliceSource {
 public:
  explicit MemorySlices(StateTable& table) : table_(table) {}
  at::Tensor bring(int64_t unit, const at::Tensor& place) override {
    const auto& slice = table_.memory(unit, State::parameters);
    if (!table_.plan(unit).comes_up()) return slice;
    const std::lock_guard lock(mutex_);
    table_.copier().up(place.data_ptr(), slice.const_data_ptr(),
                       static_cast<int64_t>(slice.nbytes()), sent_up_);
    return place;
  }
  void settle() override { sent_up_.wait_on_host(); }

 private:
  StateTable& table_;
  std::mutex mutex_;    // guards the next member
  StreamMark sent_up_;  // marks the end of the copies
};

}  // namespace

std::unique_ptr<SliceSource> memory_slices(StateTable& table) {
  return std::make_unique<MemorySlices>(table);
}

}  // namespace zero
