// The numbers of a run over which monitors draw curves, and their names.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "zero/train/monitor.h"

namespace zero::train {

struct Metric {
  std::string_view name;
  bool by_samples = false;  ///< its axis: sequences that the run has taken, else steps
};

/// The parts of a breakdown, as log.jsonl names them.
struct BreakdownPart {
  std::string_view name;
  double Breakdown::*ms;
};
inline constexpr std::array<BreakdownPart, 8> kBreakdown{{{"forward_ms", &Breakdown::forward},
                                                          {"backward_ms", &Breakdown::backward},
                                                          {"step_ms", &Breakdown::step},
                                                          {"gather_ms", &Breakdown::gather},
                                                          {"reduce_ms", &Breakdown::reduce},
                                                          {"update_ms", &Breakdown::update},
                                                          {"disk_ms", &Breakdown::disk},
                                                          {"control_ms", &Breakdown::control}}};

/// The parts of a link's time, as log.jsonl names them, and as reports for people do.
struct LinkPart {
  std::string_view name;
  std::string_view text;
  double comm::LinkTimes::*ms;
};
inline constexpr std::array<LinkPart, 4> kLinkParts{
    {{"busy_ms", "busy", &comm::LinkTimes::busy},
     {"nothing_to_send_ms", "nothing to send", &comm::LinkTimes::nothing_to_send},
     {"processor_ms", "processor busy", &comm::LinkTimes::processor},
     {"peer_late_ms", "peer late", &comm::LinkTimes::peer_late}}};

/// DeepSpeed's names first (its engine's `Train/Samples/...`), then those of log.jsonl. A
/// validation's come last.
inline constexpr std::array<Metric, 22> kMetrics{{{"Train/Samples/train_loss", true},
                                                  {"Train/Samples/lr", true},
                                                  {"Train/Samples/loss_scale", true},
                                                  {"Train/Steps/loss"},
                                                  {"Train/Steps/grad_norm"},
                                                  {"Train/Steps/lr"},
                                                  {"Train/Steps/loss_scale"},
                                                  {"Train/Steps/tokens_per_s"},
                                                  {"Train/Steps/step_ms"},
                                                  {"Train/Steps/comm_ms"},
                                                  {"Train/Steps/disk_ms"},
                                                  {"Train/Steps/memory_peak"},
                                                  {"Train/Breakdown/forward_ms"},
                                                  {"Train/Breakdown/backward_ms"},
                                                  {"Train/Breakdown/step_ms"},
                                                  {"Train/Breakdown/gather_ms"},
                                                  {"Train/Breakdown/reduce_ms"},
                                                  {"Train/Breakdown/update_ms"},
                                                  {"Train/Breakdown/disk_ms"},
                                                  {"Train/Breakdown/control_ms"},
                                                  {"Validation/Steps/loss"},
                                                  {"Validation/Steps/accuracy"}}};
inline constexpr size_t kStepMetrics = kMetrics.size() - 2;
inline constexpr size_t kValidationLoss = kStepMetrics;
inline constexpr size_t kValidationAccuracy = kStepMetrics + 1;

/// Returns the values of a step in the order of kMetrics. The loss scale is empty if losses are not
/// scaled, and the breakdown without wall_clock_breakdown.
inline std::array<std::optional<double>, kStepMetrics> values_of(const StepReport& report) {
  std::optional<double> scale;
  if (report.loss_scale != 0) scale = report.loss_scale;
  std::array<std::optional<double>, kStepMetrics> values{
      report.loss,      report.lr,      scale,          report.loss,
      report.grad_norm, report.lr,      scale,          report.tokens_per_s,
      report.step_ms,   report.comm_ms, report.disk_ms, static_cast<double>(report.memory_peak)};
  if (report.breakdown) {
    for (size_t i = 0; i < kBreakdown.size(); ++i)
      values[kStepMetrics - kBreakdown.size() + i] = *report.breakdown.*kBreakdown[i].ms;
  }
  return values;
}

/// Returns the position of a run on a metric's axis after `step`.
inline int64_t position(const Metric& metric, const RunInfo& run, int64_t step) {
  return metric.by_samples ? run.first_sample + (step - run.first_step + 1) * run.samples_per_step()
                           : step;
}

}  // namespace zero::train
