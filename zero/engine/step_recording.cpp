#include "zero/engine/step_recording.h"

#include <algorithm>
#include <utility>

#include "zero/comm/gather_records.h"
#include "zero/engine/flows.h"

namespace zero {

void StepRecording::start_first(const Flows& flows) {
  auto& gather = flows.gather();
  // Units that are read in place are not gathered ahead.
  chooses_prefetch_ =
      plan_.config().prefetch_speeds.compute > 0 && gather.pager() != nullptr && !gather.in_place();
  if (chooses_prefetch_) start(flows);
}

void StepRecording::start(const Flows& flows) {
  record_with(nullptr, flows);  // a thread can have one callback only
  record_with(std::make_unique<StepRecorder>(*flows.gather().pager()), flows);
}

void StepRecording::record_with(std::unique_ptr<StepRecorder> next, const Flows& flows) {
  flows.reduce().observe(next.get());
  recorder_ = std::move(next);
}

void StepRecording::end_step(bool updated, const Flows& flows) {
  if (!recorder_) return;
  if (!updated) {
    recorder_->restart();
    return;
  }
  auto& pager = *flows.gather().pager();
  if (const auto* plan = pager.plan()) {
    const auto& config = plan_.config();
    recorded_ = {.trace = plan->trace,
                 .gathers = true,
                 // Only stage 3 has a pager.
                 .reduces_in = paging::ReducesIn::every_pass,
                 .budget_bytes = pager.budget(),
                 .prefetch_bytes = pager.prefetch(),
                 .read_ahead_bytes = config.offload_param.buffer_count * config.unit_bytes /
                                     plan_.placement().shards->size()};
    recorder_->write(*recorded_);
    auto step = plan_.step();
    step.in_place = flows.gather().in_place();
    recorded_->units = unit_costs(step);
  }
  stop(flows);
  if (std::exchange(chooses_prefetch_, false)) choose_prefetch(pager);
}

void StepRecording::choose_prefetch(paging::Pager& pager) {
  const auto& given = plan_.config().prefetch_speeds;
  // A step that is too long for a plan has no schedule.
  const int64_t mine = !recorded_ ? pager.prefetch()
                                  : paging::choose_prefetch(*recorded_, {.compute = given.compute,
                                                                         .link = given.link,
                                                                         .pcie = given.pcie,
                                                                         .disk = given.disk})
                                        .prefetch_bytes;
  const int64_t chosen =
      std::ranges::max(comm::gather_records(plan_.group(), mine, "prefetch distance"));
  pager.set_prefetch(chosen);
  if (recorded_) recorded_->prefetch_bytes = chosen;
}

}  // namespace zero
