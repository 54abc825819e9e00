#include "zero/engine/parameter_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/host_memory.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::Range;

ParameterStore::ParameterStore(const partition::Layout& layout, std::vector<at::ScalarType> dtypes,
                               comm::Group& group, Options options)
    : layout_(layout),
      dtypes_(std::move(dtypes)),
      group_(group),
      options_(std::move(options)),
      epoch_(dtypes_.size(), 0),
      fetches_(dtypes_.size()) {
  const int64_t units = layout_.unit_count();
  int64_t bytes = 0;
  for (int64_t u = 0; u < units; ++u) {
    const auto& unit = layout_.unit(u);
    labels_.push_back(fmt::format(
        "unit {} ({})", u,
        layout_.parameters()[static_cast<size_t>(unit.segments.front().parameter)].name));
    window_offset_.push_back(bytes);
    bytes += unit.bytes();
  }
  if (options_.placement.parameters) {
    const bool all_here = std::all_of(options_.tiers.begin(), options_.tiers.end(),
                                      [](Tier tier) { return tier == Tier::device; });
    // Slices that are elsewhere have no place in a window.
    if (options_.one_sided && options_.disk == nullptr && all_here)
      window_ = group_.window(bytes, units, Category::parameters);
    if (window_) view_ = window_->view();
  }
  for (int64_t u = 0; u < units; ++u) {
    const auto& unit = layout_.unit(u);
    const int64_t slice = layout_.slice_numel(u);
    if (window_) {
      owned_.push_back(window_->memory()
                           .narrow(0, window_offset_[static_cast<size_t>(u)], unit.bytes())
                           .view(dtype(u))
                           .narrow(0, slice * group_.rank(), slice));
    } else if (on_disk(u)) {
      owned_.emplace_back();
    } else if (tier(u) == Tier::host) {
      owned_.push_back(host_zeros(slice, dtype(u), group_.ledger(), Category::host_parameters));
    } else if (options_.placement.parameters) {
      owned_.push_back(group_.empty(slice, dtype(u), Category::parameters).zero_());
    } else {
      // Where the ranks gather into it, the array lies where the peers can read it.
      units_.push_back(
          options_.placement.optimizer
              ? group_.empty(unit.numel, dtype(u), Category::parameters).zero_()
              : host_zeros(unit.numel, dtype(u), group_.ledger(), Category::parameters));
      const auto range = owned_range(u);
      owned_.push_back(units_.back().narrow(0, range.begin, range.size()));
    }
  }
}

// Peers may still read the window: it goes when all are here. Not while an error unwinds, when some
// may never come.
ParameterStore::~ParameterStore() {
  if (!window_ || std::uncaught_exceptions() > 0) return;
  try {
    group_.barrier("end of the engine");
  } catch (const CommError&) {  // a peer is gone, and with it the reader
  }
}

Range ParameterStore::owned_range(int64_t unit) const {
  return partition::owned_range(layout_, unit, options_.placement, group_.rank());
}

at::Tensor ParameterStore::owned(int64_t unit) const {
  return on_disk(unit) ? options_.disk->read(unit, 0) : owned_[static_cast<size_t>(unit)];
}

void ParameterStore::write(int64_t index, const at::Tensor& values) {
  const int64_t u = layout_.unit_of(index);
  const auto& segment = layout_.segment_of(index);
  const auto range = owned_range(u);
  const auto mine = partition::intersect(segment.range(), range);
  if (mine.empty()) return;
  const auto part = values.narrow(0, mine.begin - segment.offset, mine.size());
  if (on_disk(u)) {
    options_.disk->write(u, 0, mine.begin - range.begin, part.to(dtype(u)));
    return;
  }
  auto place = owned_[static_cast<size_t>(u)].narrow(0, mine.begin - range.begin, mine.size());
  if (tier(u) == Tier::host && pager_ != nullptr) {  // a write through a gathered unit
    const auto values_down = part.to(dtype(u)).contiguous();
    options_.host->down(place.data_ptr(), values_down.const_data_ptr(),
                        static_cast<int64_t>(place.nbytes()));
  } else {
    place.copy_(part);
  }
}

void ParameterStore::replace(int64_t unit, const at::Tensor& values) {
  if (on_disk(unit)) {
    options_.disk->write(unit, 0, 0, values.to(dtype(unit)));
  } else {
    owned_[static_cast<size_t>(unit)].copy_(values);
  }
}

void ParameterStore::take(int64_t index, const at::Tensor& parameter) {
  const int64_t u = layout_.unit_of(index);
  const auto& segment = layout_.segment_of(index);
  const auto values = flat_view(parameter);
  auto& storage = *parameter.storage().unsafeGetStorageImpl();
  if (options_.placement.parameters) {
    write(index, values);
    HostAllocator::instance().check(storage.mutable_data());  // what was read is what was made
    // At once, not when all are here: the whole model need not fit in memory.
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::kCPU));
    return;
  }
  auto place = units_[static_cast<size_t>(u)].narrow(0, segment.offset, segment.numel);
  place.copy_(values);
  HostAllocator::instance().check(storage.mutable_data());
  // The tensor keeps its identity; its storage points into the unit, which lives as long as
  // anything that uses it.
  void* data = place.numel() > 0 ? place.data_ptr() : nullptr;
  storage.set_data_ptr_noswap(c10::DataPtr(
      data, new at::Tensor(units_[static_cast<size_t>(u)]),
      [](void* unit) { delete static_cast<at::Tensor*>(unit); }, c10::kCPU));
}

void ParameterStore::start(const std::vector<at::Tensor>& parameters) {
  if (!options_.placement.parameters) return;
  pager_ = std::make_unique<paging::Pager>(
      layout_, parameters, *this, group_.ledger(),
      paging::PagerOptions{.budget_bytes = options_.live_bytes,
                           .prefetch_bytes = options_.prefetch_bytes});
  for (int64_t u = 0; u < layout_.unit_count(); ++u) publish(u);
}

void ParameterStore::publish(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  ++epoch_[u];
  if (window_) {
    window_->publish(unit, epoch_[u]);
  } else if (!options_.placement.parameters && options_.placement.optimizer) {
    publishing_.push_back(group_.all_gather(units_[u], owned_[u], labels_[u]));
  }
}

void ParameterStore::finish_publish() {
  for (auto& work : publishing_) work.wait();
  publishing_.clear();
}

void ParameterStore::gather(int64_t unit, void* destination) {
  const auto u = static_cast<size_t>(unit);
  auto& fetch = fetches_[u];
  auto slice = owned_[u];
  if (on_disk(unit)) {
    if (options_.complete) options_.complete(unit, false);
    if (group_.size() == 1) {
      fetch.read = options_.disk->start_read(unit, 0, destination);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      if (!fetch.slice.defined()) start_read(unit);
      leave_ahead(unit);
    }
    try {
      options_.disk->wait(fetch.read);
    } catch (...) {
      drop(unit);
      throw;
    }
    slice = fetch.slice.view(dtype(unit)).narrow(0, 0, layout_.slice_numel(unit));
  }
  auto output = at::from_blob(destination, {layout_.unit(unit).numel},
                              at::TensorOptions().dtype(dtype(unit)));
  if (tier(unit) == Tier::host) {
    const auto range = owned_range(unit);
    auto place = output.narrow(0, range.begin, range.size());
    options_.host->up(place.data_ptr(), slice.const_data_ptr(),
                      static_cast<int64_t>(place.nbytes()));
    slice = place;
  }
  fetch.work = group_.all_gather(output, slice, labels_[u]);
}

void ParameterStore::finish(int64_t unit) {
  auto& fetch = fetches_[static_cast<size_t>(unit)];
  try {
    if (options_.disk != nullptr) options_.disk->wait(fetch.read);
    fetch.work.wait();
  } catch (...) {
    drop(unit);
    throw;
  }
  drop(unit);
}

bool ParameterStore::expect(int64_t unit) {
  if (options_.disk == nullptr || group_.size() == 1) return false;
  if (!on_disk(unit)) return true;
  if (options_.complete && !options_.complete(unit, true)) return false;
  const std::lock_guard lock(mutex_);
  if (fetches_[static_cast<size_t>(unit)].slice.defined()) return true;
  if (!ahead_.empty() &&
      ahead_bytes_ + options_.disk->whole_bytes(unit, 0) > options_.read_ahead_bytes)
    return false;
  start_read(unit);
  return true;
}

// With the mutex held.
void ParameterStore::start_read(int64_t unit) {
  auto& fetch = fetches_[static_cast<size_t>(unit)];
  fetch.slice = take_buffer(options_.disk->whole_bytes(unit, 0));
  ahead_.push_back(unit);
  ahead_bytes_ += options_.disk->whole_bytes(unit, 0);
  fetch.read = options_.disk->start_read(unit, 0, fetch.slice.data_ptr());
}

// Ends a fetch; its buffer serves the next one.
void ParameterStore::drop(int64_t unit) {
  const std::lock_guard lock(mutex_);
  auto fetch = std::exchange(fetches_[static_cast<size_t>(unit)], {});
  fetch.read = {};  // waits
  leave_ahead(unit);
  if (fetch.slice.defined()) buffers_.push_back(std::move(fetch.slice));
}

// With the mutex held.
void ParameterStore::leave_ahead(int64_t unit) {
  const auto found = std::find(ahead_.begin(), ahead_.end(), unit);
  if (found == ahead_.end()) return;
  ahead_.erase(found);
  ahead_bytes_ -= options_.disk->whole_bytes(unit, 0);
}

// Slices of ordinary units share buffers of one size; a larger one has its own, so that none of
// them is ever held by a small slice.
at::Tensor ParameterStore::take_buffer(int64_t bytes) {
  const int64_t whole = std::max(bytes, options_.slice_bytes);
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const auto& buffer) {
    return static_cast<int64_t>(buffer.storage().nbytes()) == whole;
  });
  at::Tensor taken;
  if (found != buffers_.end()) {
    taken = std::move(*found);
    buffers_.erase(found);
  } else {
    taken = group_.empty(whole, at::kByte, Category::offload_buffers);
  }
  return taken.as_strided({bytes}, {1}, 0);
}

// The gather is an ordering alone: the slices lie side by side already.
void* ParameterStore::view(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  for (int rank = 0; rank < group_.size(); ++rank) window_->wait(unit, rank, epoch_[u], labels_[u]);
  group_.traffic().add(comm::Collective::all_gather,
                       partition::share_sent(layout_.unit(unit).bytes(), group_.size()), 0);
  return static_cast<std::byte*>(view_.data_ptr()) + window_offset_[u];
}

void ParameterStore::forget() {
  if (window_) window_->discard();
  while (!ahead_.empty()) drop(ahead_.front());
}

at::Tensor ParameterStore::full(int64_t unit) {
  if (!options_.placement.parameters) return units_[static_cast<size_t>(unit)];
  const auto options = at::TensorOptions().dtype(dtype(unit));
  if (window_) return at::from_blob(view(unit), {layout_.unit(unit).numel}, options);
  auto slice = owned(unit);
  if (group_.size() == 1) return slice;
  auto array = at::empty({layout_.unit(unit).numel}, options);
  group_.all_gather(array, slice, labels_[static_cast<size_t>(unit)]).wait();
  return array;
}

}  // namespace zero
