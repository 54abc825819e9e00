#include "zero/engine/step_recording.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "zero/comm/gather_records.h"
#include "zero/engine/flows.h"

namespace zero {
namespace {

// Returns the bytes a second of gathers of these units, each of which has the link's latency.
double of_units(const comm::LinkSpeed& link, const std::vector<paging::UnitCosts>& units) {
  double bytes = 0;
  for (const auto& unit : units) bytes += static_cast<double>(unit.gather);
  const double seconds = bytes / link.bandwidth + link.latency * static_cast<double>(units.size());
  return bytes > 0 ? bytes / seconds : link.bandwidth;
}

}  // namespace

void StepRecording::start_first(const Flows& flows) {
  const auto& given = plan_.config().prefetch_speeds;
  const bool measured = given.link == 0 && plan_.group().measure_link().has_value();
  auto& gather = flows.gather();
  // Units that are read in place are not gathered ahead.
  if (gather.pager() == nullptr || gather.in_place()) return;
  if (given.compute > 0) {
    choice_ = Choice::recorded;
    start(flows);
  } else if (measured) {
    choice_ = Choice::warmed_up;
  }
}

void StepRecording::start(const Flows& flows) {
  record_with(nullptr, flows);  // a thread can have one callback only
  record_with(std::make_unique<StepRecorder>(*flows.gather().pager()), flows);
  begin_time();
}

void StepRecording::begin_time() {
  began_ = std::chrono::steady_clock::now();
  waited_before_ms_ = plan_.group().wait_ms();
}

void StepRecording::record_with(std::unique_ptr<StepRecorder> next, const Flows& flows) {
  flows.reduce().observe(next.get());
  recorder_ = std::move(next);
}

void StepRecording::end_step(bool updated, const Flows& flows) {
  if (!updated) {
    if (!recorder_) return;
    recorder_->restart();
    begin_time();
    return;
  }
  const bool warmed_up = choice_ == Choice::warmed_up;
  if (warmed_up) choice_ = Choice::recorded;
  if (!recorder_) {
    if (warmed_up) start(flows);
    return;
  }
  auto& pager = *flows.gather().pager();
  // A step that is too long for a plan leaves that of a step before.
  const auto* plan = pager.plan();
  if (plan != nullptr && recorder_->operators() <= plan->trace.operators()) {
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
  if (warmed_up) {
    start(flows);
  } else if (std::exchange(choice_, Choice::none) == Choice::recorded) {
    choose_prefetch(pager);
  }
}

double StepRecording::computed_flops_per_second() const {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  const double waited = (plan_.group().wait_ms() - waited_before_ms_) / 1e3;
  const double flops = std::accumulate(recorded_->flops.begin(), recorded_->flops.end(), 0.0);
  return flops / std::max(took.count() - waited, took.count() / 10);
}

void StepRecording::choose_prefetch(paging::Pager& pager) {
  const auto& given = plan_.config().prefetch_speeds;
  paging::Speeds speeds{
      .compute = given.compute, .link = given.link, .pcie = given.pcie, .disk = given.disk};
  if (const auto link = plan_.group().link_speed(); link && speeds.link == 0 && recorded_)
    speeds.link = of_units(*link, recorded_->units);
  int64_t mine = pager.prefetch();
  // A step that is too long for a plan has no schedule.
  if (recorded_ && given.compute > 0) {
    mine = paging::choose_prefetch(*recorded_, speeds).prefetch_bytes;
  } else if (const double measured = recorded_ ? computed_flops_per_second() : 0; measured > 0) {
    mine = 0;  // Note [Measured speeds]
    for (const double times : {1.0, 2.0}) {
      speeds.compute = times * measured;
      const auto choice = paging::choose_prefetch(*recorded_, speeds, 0);
      mine = std::max(mine, choice.prefetch_bytes);
    }
  }
  const int64_t chosen =
      std::ranges::max(comm::gather_records(plan_.group(), mine, "prefetch distance"));
  pager.set_prefetch(chosen);
  if (recorded_) recorded_->prefetch_bytes = chosen;
}

}  // namespace zero
