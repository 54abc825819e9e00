#include "zero/engine/parameter_writes.h"

#include <fmt/format.h>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/paging/pager.h"

namespace zero {

void ParameterWrites::commit() {
  if (auto* pager = gather_.pager()) {
    pager->settle_gathers();
    for (const int64_t i : pager->take_dirty()) {
      const int64_t u = plan_.layout().unit_of(i);
      const auto& segment = plan_.layout().segment_of(i);
      const auto dtype = table_.plan(u).dtype;
      auto values = tensor_at(pager->data(u), plan_.layout().unit(u).numel, dtype, table_.device())
                        .narrow(0, segment.offset, segment.numel);
      table_.write_from_device(i, values);
      if (plan_.trainable(u)) table_.refresh_master(i);
    }
    return;
  }
  for (const int64_t i : plan_.model().take_written([](int64_t) { return true; })) {
    if (plan_.model().trainable(i)) table_.refresh_master(i);
  }
}

void ParameterWrites::invalidate() {
  if (auto* pager = gather_.pager()) {
    pager->invalidate();
    gather_.forget();
  }
}

std::vector<uint8_t> ParameterWrites::written_units() const {
  std::vector<uint8_t> written(plan_.units().size(), 0);
  if (const auto* pager = gather_.pager()) {
    for (const int64_t p : pager->dirty())
      written[static_cast<size_t>(plan_.layout().unit_of(p))] = 1;
    return written;
  }
  for (int64_t i = 0; i < plan_.model().size(); ++i) {
    if (plan_.model().written(i)) written[static_cast<size_t>(plan_.layout().unit_of(i))] = 1;
  }
  return written;
}

void ParameterWrites::refuse(std::string_view when) {
  std::vector<int64_t> written;
  const auto is_updated = [&](int64_t p) { return plan_.model().trainable(p); };
  if (auto* pager = gather_.pager()) {
    for (const int64_t p : pager->take_dirty()) {
      if (is_updated(p)) {
        written.push_back(p);
      } else {  // stays for `commit`
        pager->mark_dirty({.pager = pager, .parameter = p, .unit = plan_.layout().unit_of(p)});
      }
    }
  } else {
    written = plan_.model().take_written(is_updated);
  }
  const auto all = comm::gather_records(
      plan_.group(), written.empty() ? plan_.model().size() : written.front(), when);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == plan_.model().size()) continue;
    throw Error(fmt::format(
        "Parameter '{}' was written on rank {} {}, which takes the place of what was written. "
        "Write it inside zero::Gathered or with Engine::set_parameter.",
        plan_.model().name(all[rank]), rank, when));
  }
}

}  // namespace zero
