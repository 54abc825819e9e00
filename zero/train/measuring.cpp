#include "zero/train/measuring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/models/layers/product_speed.h"

namespace zero::train {

Measuring::Measuring(Run& run, int64_t first_step)
    : run_(run), first_step_(first_step), traffic_(*run.engine) {}

Measuring::Session::Session(Measuring& measuring) : group_(*measuring.run_.group) {
  const auto& options = measuring.run_.options;
  auto& accounts = group_.accounts();
  accounts.timeline->measure(options.wall_clock_breakdown);
  const auto& logger = options.comms_logger;
  if (logger.enabled && group_.rank() == 0) {
    const auto wanted = [chosen = logger.prof_ops, all = logger.prof_all](comm::Collective op) {
      return all || std::any_of(chosen.begin(), chosen.end(), [&](const std::string& name) {
               return name.starts_with(comm::name(op)) ||
                      (op == comm::Collective::control && name.ends_with("barrier"));
             });
    };
    std::function<void(const comm::CallTime&)> told;
    if (logger.verbose) {
      told = [&reports = measuring.run_.reports, named = logger.debug](comm::CallTime call) {
        if (!named) call.label = {};
        reports.tell_or_throw([&](Monitor& monitor) { monitor.call(call); });
      };
    }
    accounts.calls->start(wanted, std::move(told));
  }
  measuring.measure_products();
}

Measuring::Session::~Session() {
  group_.accounts().calls->stop();
  group_.accounts().timeline->measure(false);
}

void Measuring::measure_products() {
  if (!run_.options.flops_profiler.enabled) return;
  comm::agree_on_rank_zero(*run_.group, "Measuring matrix products", [] {});  // so that all begin
                                                                              // together
  try {
    const auto& config = run_.engine->config();
    product_speed_ = best_product_speed(config.autocast_dtype().value_or(config.parameter_dtype()),
                                        run_.group->device());
  } catch (const OutOfMemory&) {
    product_speed_ = 0;  // the run fills the memory: its report has no MFU
  } catch (const c10::OutOfMemoryError&) {
    product_speed_ = 0;  // the run fills the device's memory
  }
}

bool Measuring::is_profiled(int64_t step) const {
  return !run_.options.profile.empty() && step == first_step_ + run_.options.profile_step - 1;
}

void Measuring::begin_step(int64_t step) {
  auto& group = *run_.group;
  if (is_profiled(step)) profile_.emplace(group);
  if (run_.options.wall_clock_breakdown) (void)group.accounts().timeline->take_breakdown();
  begin_ = Clock::now();
  waited_before_ = group.wait_ms();
  disk_before_ = run_.engine->disk().wait_ms;
  link_before_ = group.link_times();
  traffic_.begin_step();
  const auto& flops = run_.options.flops_profiler;
  const bool counts = flops.enabled && group.rank() == 0 &&
                      step == std::min(first_step_ + flops.profile_step, run_.options.steps);
  flops_ = counts ? std::make_unique<FlopsProfiler>(run_.model->module()) : nullptr;
}

void Measuring::end_passes() {
  if (flops_) flops_->stop();
}

void Measuring::end_step(StepReport& report) {
  auto& group = *run_.group;
  const std::chrono::duration<double> seconds = Clock::now() - begin_;
  if (link_before_) report.link = *group.link_times() - *link_before_;
  report.step_ms = seconds.count() * 1000;
  if (is_profiled(report.step)) profile_->stop();
  if (run_.options.wall_clock_breakdown)
    report.breakdown = group.accounts().timeline->take_breakdown();
  report.tokens_per_s = static_cast<double>(run_.tokens_per_step()) / report.step_ms * 1000;
  report.comm_ms = group.wait_ms() - waited_before_;
  report.disk_ms = run_.engine->disk().wait_ms - disk_before_;
  report.memory_peak = group.ledger()->total().peak;
  if (flops_) report.flops = flops_of(report);
  flops_.reset();
  last_time_ = {.busy_ms = static_cast<float>(report.step_ms - report.comm_ms),
                .disk_ms = static_cast<float>(report.disk_ms)};
}

FlopsReport Measuring::flops_of(const StepReport& report) const {
  const auto& settings = run_.options.flops_profiler;
  return {.step = {.step = report.step,
                   .ranks = run_.group->size(),
                   .recompute_factor = settings.recompute_fwd_factor,
                   .step_ms = report.step_ms,
                   .tokens_per_s = report.tokens_per_s,
                   .peak = product_speed_,
                   .model = flops_->profile()},
          .options = {.module_depth = settings.module_depth,
                      .top_modules = settings.top_modules,
                      .detailed = settings.detailed},
          .file = settings.output_file};
}

void Measuring::write_profile() {
  const auto written = profile_->write(run_.options.profile);
  profile_.reset();
  const ProfileReport told{.step = first_step_ + run_.options.profile_step - 1,
                           .file = run_.options.profile,
                           .spans = written.spans,
                           .dropped = written.dropped};
  run_.reports.tell([&](Monitor& monitor) { monitor.profile(told); });
}

}  // namespace zero::train
