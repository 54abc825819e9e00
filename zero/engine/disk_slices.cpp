// Slices on a disk.
//
// Note [Parameters on disk]
// A slice on disk comes through two levels (ZeRO-Infinity, 2104.07857, section 6.1). Every rank
// reads its own slice, 1/N of the unit, so the disks of all hosts work for each unit; then the
// group gathers. The pager names the gathers to come (`expect`), so that reads run ahead of
// gathers, and gathers ahead of operators. A rank that is alone reads straight to the unit's place,
// if that is in the host's memory. A device gets the slice from a buffer, as in Note [Parameters on
// the host].
#include <ATen/ceil_div.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/device/memory.h"
#include "zero/device/stream.h"
#include "zero/engine/slice_source.h"
#include "zero/store/file.h"

namespace zero {

namespace {

// Reads slices to buffers, ahead of their gathers.
class BufferedSlices final : public SliceSource {
 public:
  BufferedSlices(StateTable& table, PendingUpdates& updates, DiskReads options)
      : table_(table),
        updates_(updates),
        options_(options),
        reads_(static_cast<size_t>(table.layout().unit_count())) {}

  at::Tensor bring(int64_t unit, const at::Tensor& place) override;
  void release(int64_t unit) override;
  bool read_ahead(int64_t unit) override;
  void forget() override;

 private:
  struct Buffer {
    at::Tensor memory;
    StreamMark sent;  // marks the end of the last slice's copy to the device
  };
  struct Read {
    Buffer buffer;
    store::Transfer transfer;
  };
  // The caller of these holds the mutex.
  void start(int64_t unit);
  void leave_ahead(int64_t unit);
  Buffer take_buffer(int64_t bytes);

  StateTable& table_;
  PendingUpdates& updates_;
  DiskReads options_;
  std::mutex mutex_;             // guards the members below
  std::vector<Read> reads_;      // by unit
  std::list<int64_t> ahead_;     // units that have been read and not gathered yet, oldest first
  int64_t ahead_bytes_ = 0;      // bytes of `ahead_`
  std::vector<Buffer> buffers_;  // those that hold no slice
};

at::Tensor BufferedSlices::bring(int64_t unit, const at::Tensor& place) {
  auto& read = reads_[static_cast<size_t>(unit)];
  {
    const std::lock_guard lock(mutex_);
    if (!read.buffer.memory.defined()) start(unit);
    leave_ahead(unit);
  }
  table_.wait(read.transfer);
  const auto& plan = table_.plan(unit);
  auto slice = read.buffer.memory.view(plan.dtype).narrow(0, 0, table_.layout().slice_numel(unit));
  if (!plan.comes_up()) return slice;
  table_.copier().up(place.data_ptr(), slice.const_data_ptr(), static_cast<int64_t>(slice.nbytes()),
                     read.buffer.sent);
  return place;
}

// Frees the buffer for the next slice.
void BufferedSlices::release(int64_t unit) {
  const std::lock_guard lock(mutex_);
  auto read = std::exchange(reads_[static_cast<size_t>(unit)], {});
  read.transfer = {};  // waits
  leave_ahead(unit);
  if (read.buffer.memory.defined()) buffers_.push_back(std::move(read.buffer));
}

bool BufferedSlices::read_ahead(int64_t unit) {
  if (!updates_.try_complete(unit)) return false;
  const std::lock_guard lock(mutex_);
  if (reads_[static_cast<size_t>(unit)].buffer.memory.defined()) return true;
  const int64_t bytes = table_.transfer_bytes(unit, State::parameters);
  if (!ahead_.empty() && ahead_bytes_ + bytes > options_.ahead_bytes) return false;
  start(unit);
  return true;
}

void BufferedSlices::forget() {
  while (!ahead_.empty()) release(ahead_.front());
}

void BufferedSlices::start(int64_t unit) {
  auto& read = reads_[static_cast<size_t>(unit)];
  const int64_t bytes = table_.transfer_bytes(unit, State::parameters);
  read.buffer = take_buffer(bytes);
  ahead_.push_back(unit);
  ahead_bytes_ += bytes;
  read.transfer = table_.start_read(unit, State::parameters, read.buffer.memory.data_ptr());
}

void BufferedSlices::leave_ahead(int64_t unit) {
  const auto found = std::find(ahead_.begin(), ahead_.end(), unit);
  if (found == ahead_.end()) return;
  ahead_.erase(found);
  ahead_bytes_ -= table_.transfer_bytes(unit, State::parameters);
}

// Slices of ordinary units share buffers of one size. A larger slice has a buffer of its own, so
// that no small slice ever holds such a buffer.
BufferedSlices::Buffer BufferedSlices::take_buffer(int64_t bytes) {
  const int64_t whole = at::round_up(std::max(bytes, options_.slice_bytes), store::kAlignment);
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const auto& buffer) {
    return buffer.memory.numel() == whole;
  });
  if (found != buffers_.end()) {
    auto taken = std::move(*found);
    buffers_.erase(found);
    taken.sent.wait_on_host();
    return taken;
  }
  if (table_.device().is_cpu())
    return {.memory = table_.group().empty(whole, at::kByte, Category::offload_buffers),
            .sent = {}};
  // A disk wants aligned addresses, and pinned memory need not begin at one.
  auto memory = pinned_zeros(whole + store::kAlignment, at::kByte, table_.device(), table_.ledger(),
                             Category::host_buffers);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data_ptr()));
  return {.memory = memory.narrow(0, at::round_up(address, store::kAlignment) - address, whole),
          .sent = {}};
}

// Reads the slices of a rank that is alone, which are whole units, straight to their place.
class DirectSlices final : public SliceSource {
 public:
  explicit DirectSlices(StateTable& table)
      : table_(table), transfers_(static_cast<size_t>(table.layout().unit_count())) {}

  at::Tensor bring(int64_t unit, const at::Tensor& place) override {
    transfer(unit) = table_.start_read(unit, State::parameters, place.data_ptr());
    return {};
  }

  void finish(int64_t unit) override { table_.wait(transfer(unit)); }
  void release(int64_t unit) override { transfer(unit) = {}; }
  bool read_ahead(int64_t /*unit*/) override { return false; }

 private:
  store::Transfer& transfer(int64_t unit) { return transfers_[static_cast<size_t>(unit)]; }

  StateTable& table_;
  std::vector<store::Transfer> transfers_;  // by unit
};

}  // namespace

std::unique_ptr<SliceSource> disk_slices(StateTable& table, PendingUpdates& updates,
                                         DiskReads reads) {
  if (table.group().size() == 1 && table.device().is_cpu())
    return std::make_unique<DirectSlices>(table);
  return std::make_unique<BufferedSlices>(table, updates, reads);
}

}  // namespace zero
