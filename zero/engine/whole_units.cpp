#include "zero/engine/whole_units.h"

#include "zero/engine/flat.h"

namespace zero {

WholeUnits::WholeUnits(const partition::Layout& layout, StateTable& table,
                       const Placement& placement)
    : layout_(layout),
      table_(table),
      group_(*placement.shards),
      gathers_(placement.sharded.optimizer) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) labels_.push_back(unit_label(layout_, u));
}

void WholeUnits::take(int64_t index, const at::Tensor& parameter) {
  const auto& unit = table_.whole(layout_.unit_of(index));
  const auto& segment = layout_.segment_of(index);
  auto place = unit.narrow(0, segment.offset, segment.numel);
  place.copy_(flat_view(parameter));
  check_memory_of(parameter);
  // The unit lives as long as anything that uses the storage.
  void* data = place.numel() > 0 ? place.data_ptr() : nullptr;
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(
      data, new at::Tensor(unit), [](void* held) { delete static_cast<at::Tensor*>(held); },
      parameter.device()));
}

void WholeUnits::publish(int64_t unit) {
  if (!gathers_) return;
  publishing_.push_back(group_.all_gather(
      table_.whole(unit), table_.memory(unit, State::parameters),
      labels_[static_cast<size_t>(unit)], table_.plan(unit).parameter_link.wire()));
}

void WholeUnits::finish_publish() {
  for (auto& work : publishing_) work.wait();
  publishing_.clear();
}

}  // namespace zero
