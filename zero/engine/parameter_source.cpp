#include "zero/engine/parameter_source.h"

#include "zero/base/host_allocator.h"
#include "zero/engine/flat.h"

namespace zero {

void check_memory_of(const at::Tensor& parameter) {
  if (parameter.device().is_cpu())
    HostAllocator::instance().check(parameter.storage().mutable_data());
}

// Frees the memory of each parameter at once, so the whole model need not fit in memory.
void PagedSource::take(int64_t index, const at::Tensor& parameter, bool has_values) {
  if (has_values) table_.write_parameter(index, flat_view(parameter));
  check_memory_of(parameter);
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, parameter.device()));
}

at::Tensor PagedSource::full(int64_t unit) {
  return table_.full(unit, table_.read(unit, State::parameters));
}

void PagedSource::touched(int64_t unit) {
  group().activity()->use(label(unit));
  if (touched_) touched_();
}

}  // namespace zero
