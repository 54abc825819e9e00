#include "zero/engine/gather.h"

#include <utility>

namespace zero {

namespace {

std::unique_ptr<ParameterSource> make_source(const SourceParts& parts, DiskReads disk) {
  if (!parts.placement.sharded.parameters) return whole_units(parts);
  if (parts.placement.host != nullptr) return kept_units(parts);
  return parts.table.window() != nullptr ? window_units(parts) : sliced_units(parts, disk);
}

}  // namespace

GatherFlow::GatherFlow(StateTable& table, const Placement& placement, Options options)
    : table_(table),
      options_(std::move(options)),
      source_(make_source({table, placement, options_.touched}, options_.disk)) {}

void GatherFlow::start(const std::vector<at::Tensor>& parameters, PendingUpdates& updates) {
  auto* paged = source_->start(updates);
  if (paged == nullptr) return;
  pager_ = std::make_unique<paging::Pager>(
      table_.layout(), parameters, *paged, table_.ledger(),
      paging::PagerOptions{.device = table_.device(),
                           .budget_bytes = options_.live_bytes,
                           .prefetch_bytes = options_.prefetch_bytes,
                           .rethrow = options_.rethrow});
  for (int64_t u = 0; u < table_.layout().unit_count(); ++u) publish(u);
}

void GatherFlow::settle() {
  source_->settle();
  table_.wait_for_copies();
}

}  // namespace zero
