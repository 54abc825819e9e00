#include "zero/engine/disk_slices.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <utility>

#include "zero/device/memory.h"

namespace zero {

BufferedSlices::BufferedSlices(const partition::Layout& layout, StateTable& table,
                               comm::Group& group, LateUpdates& updates, Options options)
    : layout_(layout),
      table_(table),
      group_(group),
      updates_(updates),
      options_(options),
      reads_(static_cast<size_t>(layout.unit_count())) {}

at::Tensor BufferedSlices::bring(int64_t unit, const at::Tensor& place) {
  updates_.complete(unit);
  auto& read = reads_[static_cast<size_t>(unit)];
  {
    const std::lock_guard lock(mutex_);
    if (!read.buffer.memory.defined()) start(unit);
    leave_ahead(unit);
  }
  table_.wait(read.transfer);
  const auto& plan = table_.plan(unit);
  const auto slice = read.buffer.memory.view(plan.dtype).narrow(0, 0, layout_.slice_numel(unit));
  if (!plan.comes_up()) return slice;
  table_.link().up(place.data_ptr(), slice.const_data_ptr(), static_cast<int64_t>(slice.nbytes()),
                   read.buffer.sent);
  return place;
}

// The buffer serves the next slice.
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

// Slices of ordinary units share buffers of one size; a larger slice has its own, so that no small
// one ever holds that.
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
    return {.memory = group_.empty(whole, at::kByte, Category::offload_buffers), .sent = {}};
  // Pinned memory need not begin where a disk wants it.
  auto memory = pinned_zeros(whole + store::kAlignment, at::kByte, table_.device(), table_.ledger(),
                             Category::host_buffers);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data_ptr()));
  return {.memory = memory.narrow(0, at::round_up(address, store::kAlignment) - address, whole),
          .sent = {}};
}

DirectSlices::DirectSlices(const partition::Layout& layout, StateTable& table, LateUpdates& updates)
    : table_(table), updates_(updates), transfers_(static_cast<size_t>(layout.unit_count())) {}

at::Tensor DirectSlices::bring(int64_t unit, const at::Tensor& place) {
  updates_.complete(unit);
  transfers_[static_cast<size_t>(unit)] =
      table_.start_read(unit, State::parameters, place.data_ptr());
  return {};
}

void DirectSlices::finish(int64_t unit) { table_.wait(transfers_[static_cast<size_t>(unit)]); }

void DirectSlices::release(int64_t unit) { transfers_[static_cast<size_t>(unit)] = {}; }

}  // namespace zero
