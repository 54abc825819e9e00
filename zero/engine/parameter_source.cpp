#include "zero/engine/parameter_source.h"

#include <ATen/ops/empty.h>

#include "zero/base/host_allocator.h"
#include "zero/engine/flat.h"

namespace zero {

void check_memory_of(const at::Tensor& parameter) {
  if (parameter.device().is_cpu())
    HostAllocator::instance().check(parameter.storage().mutable_data());
}

std::vector<std::string> unit_labels(const partition::Layout& layout) {
  std::vector<std::string> labels;
  for (int64_t u = 0; u < layout.unit_count(); ++u) labels.push_back(unit_label(layout, u));
  return labels;
}

PagedSource::PagedSource(const SourceParts& parts)
    : layout_(parts.layout),
      table_(parts.table),
      group_(*parts.placement.shards),
      touched_(parts.touched),
      labels_(unit_labels(parts.layout)) {}

// The memory of each parameter is freed at once: the whole model need not fit in memory.
void PagedSource::take(int64_t index, const at::Tensor& parameter) {
  table_.write_parameter(index, flat_view(parameter));
  check_memory_of(parameter);
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, parameter.device()));
}

at::Tensor PagedSource::full(int64_t unit) {
  auto slice = table_.read(unit, State::parameters).to(table_.device());
  if (group_.size() == 1) return slice;
  auto array = at::empty({layout_.unit(unit).numel},
                         at::TensorOptions(table_.plan(unit).dtype).device(table_.device()));
  group_.all_gather(array, slice, label(unit)).wait();
  return array;
}

void PagedSource::touched(int64_t unit) {
  group_.activity()->use(label(unit));
  if (touched_) touched_();
}

}  // namespace zero
