#include "zero/engine/gather.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/timeline.h"
#include "zero/comm/flight.h"
#include "zero/device/memory.h"
#include "zero/engine/flat.h"

namespace zero {

GatherFlow::GatherFlow(const partition::Layout& layout, StateTable& table,
                       const Placement& placement, Options options)
    : layout_(layout),
      table_(table),
      placement_(placement),
      group_(*placement.shards),
      options_(std::move(options)),
      epoch_(static_cast<size_t>(layout.unit_count()), 0),
      fetches_(static_cast<size_t>(layout.unit_count())) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    labels_.push_back(unit_label(layout_, u));
    reads_disk_ = reads_disk_ || on_disk(u);
  }
  if (auto* window = table_.window()) {
    view_ = window->view();
    const auto memory = window->memory();
    for (int64_t u = 0; u < layout_.unit_count(); ++u) {
      places_.push_back(memory.narrow(0, table_.window_offset(u), layout_.unit(u).bytes())
                            .view(table_.plan(u).dtype));
    }
  }
}

// Peers may still read the window: it goes when all are here. Not while an error unwinds, when some
// may never come.
GatherFlow::~GatherFlow() {
  if (table_.window() == nullptr || std::uncaught_exceptions() > 0) return;
  try {
    settle();
    group_.barrier("end of the engine");
  } catch (const CommError&) {  // a peer is gone, and with it the reader
  }
}

void GatherFlow::take(int64_t index, const at::Tensor& parameter) {
  const int64_t u = layout_.unit_of(index);
  const auto& segment = layout_.segment_of(index);
  const auto values = flat_view(parameter);
  auto& storage = *parameter.storage().unsafeGetStorageImpl();
  const auto check = [&] {  // what was read is what was made
    if (parameter.device().is_cpu()) HostAllocator::instance().check(storage.mutable_data());
  };
  if (placement_.sharded.parameters) {
    table_.write_parameter(index, values);
    check();
    // At once, not when all are here: the whole model need not fit in memory.
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, parameter.device()));
    return;
  }
  auto place = table_.whole(u).narrow(0, segment.offset, segment.numel);
  place.copy_(values);
  check();
  // The tensor keeps its identity; its storage points into the unit, which lives as long as
  // anything that uses it.
  void* data = place.numel() > 0 ? place.data_ptr() : nullptr;
  storage.set_data_ptr_noswap(c10::DataPtr(
      data, new at::Tensor(table_.whole(u)),
      [](void* unit) { delete static_cast<at::Tensor*>(unit); }, parameter.device()));
}

void GatherFlow::start(const std::vector<at::Tensor>& parameters) {
  if (!placement_.sharded.parameters) return;
  pager_ = std::make_unique<paging::Pager>(
      layout_, parameters, *this, group_.ledger(),
      paging::PagerOptions{.device = table_.device(),
                           .budget_bytes = options_.live_bytes,
                           .prefetch_bytes = options_.prefetch_bytes,
                           .rethrow = options_.rethrow});
  for (int64_t u = 0; u < layout_.unit_count(); ++u) publish(u);
}

void GatherFlow::publish(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  ++epoch_[u];
  published_.record(table_.device());
  if (table_.window() != nullptr) {
    table_.window()->publish(unit, epoch_[u],
                             {.whole = places_[u],
                              .slice = table_.memory(unit, State::parameters),
                              .label = labels_[u],
                              .wire = table_.plan(unit).parameter_link.wire()});
  } else if (!placement_.sharded.parameters && placement_.sharded.optimizer) {
    publishing_.push_back(group_.all_gather(table_.whole(unit),
                                            table_.memory(unit, State::parameters), labels_[u],
                                            table_.plan(unit).parameter_link.wire()));
  }
}

void GatherFlow::finish_publish() {
  for (auto& work : publishing_) work.wait();
  publishing_.clear();
}

void GatherFlow::settle() {
  if (table_.window() != nullptr) table_.window()->settle();
  sent_up_.wait_on_host();
  table_.wait_for_copies();
}

void GatherFlow::gather(int64_t unit, void* destination) {
  const auto u = static_cast<size_t>(unit);
  const auto& plan = table_.plan(unit);
  auto& fetch = fetches_[u];
  published_.wait();
  at::Tensor slice;
  if (on_disk(unit)) {
    options_.complete(unit, false);
    if (!reads_to_buffers()) {
      fetch.read = table_.disk()->start_read(unit, place(unit), destination);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      if (!fetch.buffer.memory.defined()) start_read(unit);
      leave_ahead(unit);
    }
    try {
      table_.disk()->wait(fetch.read);
    } catch (...) {
      drop(unit);
      throw;
    }
    slice = fetch.buffer.memory.view(plan.dtype).narrow(0, 0, layout_.slice_numel(unit));
  } else {
    slice = table_.memory(unit, State::parameters);
  }
  auto output = tensor_at(destination, layout_.unit(unit).numel, plan.dtype, table_.device());
  if (plan.comes_up()) {
    auto place = output.narrow(0, layout_.slice_numel(unit) * group_.rank(), slice.numel());
    const auto bytes = static_cast<int64_t>(place.nbytes());
    if (on_disk(unit)) {
      table_.link().up(place.data_ptr(), slice.const_data_ptr(), bytes, fetch.buffer.sent);
    } else {
      const std::lock_guard lock(mutex_);
      table_.link().up(place.data_ptr(), slice.const_data_ptr(), bytes, sent_up_);
    }
    slice = place;
  }
  fetch.work = group_.all_gather(output, slice, labels_[u], plan.parameter_link.wire());
}

// The window has the values that are kept, and not those that quantised messages carry.
bool GatherFlow::in_window(int64_t unit) const {
  return in_place() &&
         (group_.topology().hosts == 1 || !table_.plan(unit).parameter_link.quantised());
}

void GatherFlow::finish(int64_t unit) {
  auto& fetch = fetches_[static_cast<size_t>(unit)];
  try {
    if (reads_disk_) table_.disk()->wait(fetch.read);
    fetch.work.wait();
  } catch (...) {
    drop(unit);
    throw;
  }
  drop(unit);
}

bool GatherFlow::expect(int64_t unit) {
  if (!reads_disk_ || !reads_to_buffers()) return false;
  if (!on_disk(unit)) return true;
  if (!options_.complete(unit, true)) return false;
  const std::lock_guard lock(mutex_);
  if (fetches_[static_cast<size_t>(unit)].buffer.memory.defined()) return true;
  if (!ahead_.empty() &&
      ahead_bytes_ + table_.disk()->whole_bytes(unit, place(unit)) > options_.read_ahead_bytes)
    return false;
  start_read(unit);
  return true;
}

// With the mutex held.
void GatherFlow::start_read(int64_t unit) {
  auto& fetch = fetches_[static_cast<size_t>(unit)];
  const int64_t bytes = table_.disk()->whole_bytes(unit, place(unit));
  fetch.buffer = take_buffer(bytes);
  ahead_.push_back(unit);
  ahead_bytes_ += bytes;
  fetch.read = table_.disk()->start_read(unit, place(unit), fetch.buffer.memory.data_ptr());
}

// Ends a fetch; its buffer serves the next one.
void GatherFlow::drop(int64_t unit) {
  const std::lock_guard lock(mutex_);
  auto fetch = std::exchange(fetches_[static_cast<size_t>(unit)], {});
  fetch.read = {};  // waits
  leave_ahead(unit);
  if (fetch.buffer.memory.defined()) buffers_.push_back(std::move(fetch.buffer));
}

// With the mutex held.
void GatherFlow::leave_ahead(int64_t unit) {
  const auto found = std::find(ahead_.begin(), ahead_.end(), unit);
  if (found == ahead_.end()) return;
  ahead_.erase(found);
  ahead_bytes_ -= table_.disk()->whole_bytes(unit, place(unit));
}

// Slices of ordinary units share buffers of one size; a larger one has its own, so that none of
// them is ever held by a small slice.
GatherFlow::Buffer GatherFlow::take_buffer(int64_t bytes) {
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

// Units [first, last) with bytes on the pages that this unit lies on. Where the user writes to it,
// these pages do not follow the window any more (comm::Window::view): what else is there must be
// valid by then too.
std::pair<int64_t, int64_t> GatherFlow::units_on_pages_of(int64_t unit) const {
  constexpr int64_t kPage = 4096;
  const auto begin_of = [&](int64_t u) { return table_.window_offset(u); };
  const auto end_of = [&](int64_t u) { return begin_of(u) + layout_.unit(u).bytes(); };
  int64_t first = unit;
  while (first > 0 && end_of(first - 1) > begin_of(unit) / kPage * kPage) --first;
  int64_t last = unit + 1;
  while (last < layout_.unit_count() && begin_of(last) < at::round_up(end_of(unit), kPage)) ++last;
  return {first, last};
}

// The gather is an ordering alone: the slices lie side by side already.
void* GatherFlow::view(int64_t unit) {
  const auto& accounts = group_.accounts();
  const auto bytes = layout_.unit(unit).bytes();
  const auto sent = partition::share_sent(bytes, group_.local_size());
  const auto& label = labels_[static_cast<size_t>(unit)];
  comm::Flight flight(accounts,
                      {.collective = comm::Collective::all_gather,
                       .ranks = group_.size(),
                       .in_place = true,
                       .label = label,
                       .message = bytes},
                      sent);
  const Timeline::Scope waiting(*accounts.timeline, Activity::wait_gather, label);
  const auto [first, last] = units_on_pages_of(unit);
  for (int64_t v = first; v < last; ++v) {
    for (int rank = 0; rank < group_.size(); ++rank)
      table_.window()->wait(v, rank, epoch_[static_cast<size_t>(v)],
                            labels_[static_cast<size_t>(v)]);
  }
  group_.traffic().add(comm::Collective::all_gather, sent, 0);
  flight.end();
  return static_cast<std::byte*>(view_.data_ptr()) + table_.window_offset(unit);
}

void GatherFlow::forget() {
  if (table_.window() != nullptr) table_.window()->discard();
  while (!ahead_.empty()) drop(ahead_.front());
}

at::Tensor GatherFlow::full(int64_t unit) {
  if (!placement_.sharded.parameters) return table_.whole(unit);
  const auto dtype = table_.plan(unit).dtype;
  const auto numel = layout_.unit(unit).numel;
  if (in_window(unit)) return tensor_at(view(unit), numel, dtype, c10::kCPU);
  auto slice = table_.read(unit, State::parameters).to(table_.device());
  if (group_.size() == 1) return slice;
  auto array = at::empty({numel}, at::TensorOptions(dtype).device(table_.device()));
  group_.all_gather(array, slice, labels_[static_cast<size_t>(unit)]).wait();
  return array;
}

}  // namespace zero
