// The schedule of a step that was recorded, and the distance at which units are gathered ahead.
//
// Note [One distance]
// A distance decides when gathers start beside reductions, so all ranks need the same. Each chooses
// by what it has recorded, and the largest choice is everyone's: a rank with longer sequences has
// more to hide gathers behind than one that computes less.
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"

namespace zero {

void Engine::record_schedule() {
  auto& impl = *impl_;
  if (pager() == nullptr) {
    throw ConfigError(
        "Engine::record_schedule: parameters are replicated here, so that no pager sees which of "
        "them operators use. Use stage 3, on one rank with offload_param.device \"cpu\".");
  }
  impl.record_with(nullptr);  // LibTorch has one callback a thread
  impl.record_with(std::make_unique<StepRecorder>(*pager()));
}

void Engine::Impl::record_with(std::unique_ptr<StepRecorder> next) {
  reduce->observe(next.get());
  recorder = std::move(next);
}

const paging::StepSchedule* Engine::schedule() const {
  const auto& recorded = impl_->recorded;
  return recorded ? &*recorded : nullptr;
}

void Engine::Impl::end_recording(bool updated) {
  if (!updated) {
    recorder->restart();
    return;
  }
  const auto& pages = *gather->pager();
  if (const auto* plan = pages.plan()) {
    recorded = {.trace = plan->trace,
                .gathers = true,
                // The pager that has recorded it is stage 3's.
                .reduces_in = paging::ReducesIn::every_pass,
                .budget_bytes = pages.budget(),
                .prefetch_bytes = pages.prefetch(),
                .read_ahead_bytes = config.offload_param.buffer_count * config.unit_bytes /
                                    placement.shards->size()};
    recorder->write(*recorded);
    recorded->units = unit_costs(planned());
  }
  record_with(nullptr);
  if (std::exchange(chooses_prefetch, false)) choose_prefetch();
}

void Engine::Impl::choose_prefetch() {
  auto& pages = *gather->pager();
  const auto& given = config.prefetch_speeds;
  auto mine = at::empty({1}, at::kLong);
  // A step that is too long to be planned has no schedule.
  mine[0] = !recorded ? pages.prefetch()
                      : paging::choose_prefetch(*recorded, {.compute = given.compute,
                                                            .link = given.link,
                                                            .pcie = given.pcie,
                                                            .disk = given.disk})
                            .prefetch_bytes;
  auto all = at::empty({group().size()}, at::kLong);
  group().all_gather_control(all, mine, "prefetch distance");
  const int64_t chosen = all.max().item<int64_t>();
  pages.set_prefetch(chosen);
  if (recorded) recorded->prefetch_bytes = chosen;
}

}  // namespace zero
