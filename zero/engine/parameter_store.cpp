#include "zero/engine/parameter_store.h"

#include <fmt/format.h>

#include <cstddef>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::Range;

ParameterStore::ParameterStore(const partition::Layout& layout, std::vector<at::ScalarType> dtypes,
                               comm::Group& group, Options options)
    : layout_(layout),
      dtypes_(std::move(dtypes)),
      group_(group),
      options_(options),
      epoch_(dtypes_.size(), 0) {
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
    if (options_.one_sided) window_ = group_.window(bytes, units, Category::parameters);
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
  if (options_.placement.optimizer) return layout_.slice(unit, group_.rank());
  return {0, layout_.unit(unit).numel};
}

void ParameterStore::take(int64_t index, const at::Tensor& parameter) {
  const int64_t u = layout_.unit_of(index);
  const auto& segment = layout_.segment_of(index);
  const auto values = flat_view(parameter);
  if (options_.placement.parameters) {
    const auto range = owned_range(u);
    const auto mine = partition::intersect(segment.range(), range);
    if (!mine.empty()) {
      owned(u)
          .narrow(0, mine.begin - range.begin, mine.size())
          .copy_(values.narrow(0, mine.begin - segment.offset, mine.size()));
    }
    return;  // the pager frees the parameter's memory
  }
  auto place = units_[static_cast<size_t>(u)].narrow(0, segment.offset, segment.numel);
  place.copy_(values);
  // The tensor keeps its identity; its storage points into the unit, which lives as long as
  // anything that uses it.
  void* data = place.numel() > 0 ? place.data_ptr() : nullptr;
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(
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

comm::Work ParameterStore::gather(int64_t unit, void* destination) {
  const auto u = static_cast<size_t>(unit);
  auto output = at::from_blob(destination, {layout_.unit(unit).numel},
                              at::TensorOptions().dtype(dtype(unit)));
  return group_.all_gather(output, owned_[u], labels_[u]);
}

// The gather is an ordering alone: the slices lie side by side already.
void* ParameterStore::view(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  for (int rank = 0; rank < group_.size(); ++rank) window_->wait(unit, rank, epoch_[u], labels_[u]);
  group_.traffic().add(comm::Collective::all_gather,
                       partition::share_sent(layout_.unit(unit).bytes(), group_.size()), 0);
  return static_cast<std::byte*>(view_.data_ptr()) + window_offset_[u];
}

void ParameterStore::discard_writes() {
  if (window_) window_->discard();
}

at::Tensor ParameterStore::full(int64_t unit) {
  if (!options_.placement.parameters) return units_[static_cast<size_t>(unit)];
  const auto options = at::TensorOptions().dtype(dtype(unit));
  if (window_) return at::from_blob(view(unit), {layout_.unit(unit).numel}, options);
  auto array = at::empty({layout_.unit(unit).numel}, options);
  gather(unit, array.data_ptr()).wait();
  return array;
}

}  // namespace zero
