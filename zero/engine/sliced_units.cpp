#include "zero/engine/sliced_units.h"

#include <utility>

#include "zero/device/memory.h"

namespace zero {

SlicedUnits::SlicedUnits(const partition::Layout& layout, StateTable& table,
                         const Placement& placement, std::function<void()> touched,
                         BufferedSlices::Options disk)
    : PagedSource(layout, table, placement, std::move(touched)),
      disk_(disk),
      gathers_(static_cast<size_t>(layout.unit_count())) {}

paging::UnitSource* SlicedUnits::start(LateUpdates& updates) {
  SliceSource* on_disk = nullptr;
  SliceSource* on_host = nullptr;
  SliceSource* on_device = nullptr;
  const auto add = [&](std::unique_ptr<SliceSource> source) {
    return sources_.emplace_back(std::move(source)).get();
  };
  for (int64_t u = 0; u < layout().unit_count(); ++u) {
    if (table().transfer_bytes(u, State::parameters) > 0) {
      if (on_disk == nullptr) {
        reads_ahead_ = group().size() > 1 || !table().device().is_cpu();
        if (reads_ahead_) {
          on_disk =
              add(std::make_unique<BufferedSlices>(layout(), table(), group(), updates, disk_));
        } else {
          on_disk = add(std::make_unique<DirectSlices>(layout(), table(), updates));
        }
      }
      slices_.push_back(on_disk);
    } else if (table().plan(u).comes_up()) {
      if (on_host == nullptr) on_host = add(std::make_unique<HostSlices>(table()));
      slices_.push_back(on_host);
    } else {
      if (on_device == nullptr) on_device = add(std::make_unique<DeviceSlices>(table()));
      slices_.push_back(on_device);
    }
  }
  return this;
}

void SlicedUnits::settle() {
  for (const auto& source : sources_) source->settle();
}

void SlicedUnits::forget() {
  for (const auto& source : sources_) source->forget();
}

void SlicedUnits::gather(int64_t unit, void* destination) {
  const auto& plan = table().plan(unit);
  const int64_t numel = layout().slice_numel(unit);
  published_.wait();
  const auto output =
      tensor_at(destination, layout().unit(unit).numel, plan.dtype, table().device());
  at::Tensor slice;
  try {
    slice = slices(unit).bring(unit, output.narrow(0, numel * group().rank(), numel));
  } catch (...) {
    slices(unit).release(unit);
    throw;
  }
  if (!slice.defined()) return;
  gathers_[static_cast<size_t>(unit)] =
      group().all_gather(output, slice, label(unit), plan.parameter_link.wire());
}

void SlicedUnits::finish(int64_t unit) {
  try {
    slices(unit).finish(unit);
    gathers_[static_cast<size_t>(unit)].wait();
  } catch (...) {
    release(unit);
    throw;
  }
  release(unit);
}

void SlicedUnits::release(int64_t unit) {
  gathers_[static_cast<size_t>(unit)] = {};
  slices(unit).release(unit);
}

bool SlicedUnits::expect(int64_t unit) { return reads_ahead_ && slices(unit).read_ahead(unit); }

}  // namespace zero
