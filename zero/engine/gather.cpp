#include "zero/engine/gather.h"

#include <utility>

#include "zero/engine/sliced_units.h"
#include "zero/engine/whole_units.h"
#include "zero/engine/window_units.h"

namespace zero {

namespace {

std::unique_ptr<ParameterSource> make_source(const partition::Layout& layout, StateTable& table,
                                             const Placement& placement,
                                             const GatherFlow::Options& options) {
  if (!placement.sharded.parameters) return std::make_unique<WholeUnits>(layout, table, placement);
  if (table.window() != nullptr)
    return std::make_unique<WindowUnits>(layout, table, placement, options.touched);
  return std::make_unique<SlicedUnits>(layout, table, placement, options.touched, options.disk);
}

}  // namespace

GatherFlow::GatherFlow(const partition::Layout& layout, StateTable& table,
                       const Placement& placement, Options options)
    : layout_(layout),
      table_(table),
      options_(std::move(options)),
      source_(make_source(layout, table, placement, options_)) {}

void GatherFlow::start(const std::vector<at::Tensor>& parameters, LateUpdates& updates) {
  auto* paged = source_->start(updates);
  if (paged == nullptr) return;
  pager_ = std::make_unique<paging::Pager>(
      layout_, parameters, *paged, table_.ledger(),
      paging::PagerOptions{.device = table_.device(),
                           .budget_bytes = options_.live_bytes,
                           .prefetch_bytes = options_.prefetch_bytes,
                           .rethrow = options_.rethrow});
  for (int64_t u = 0; u < layout_.unit_count(); ++u) publish(u);
}

void GatherFlow::settle() {
  source_->settle();
  table_.wait_for_copies();
}

}  // namespace zero
