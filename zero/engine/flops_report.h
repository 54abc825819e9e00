// The report of a FlopsProfiler, beside the time of the step that it has counted in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/engine/flops_profiler.h"

namespace zero {

/// The passes of one rank in one step. A value of 0 is not known, and is left out of the report.
struct StepFlops {
  int64_t step = 0;
  int ranks = 1;  ///< ranks that do the same work
  /// The part of forward that backward does again: DeepSpeed's recompute_fwd_factor.
  double recompute_factor = 0;
  double step_ms = 0;       ///< the whole step
  double tokens_per_s = 0;  ///< all ranks together
  /// FLOP/s that a rank's matrix products reach at best, while the other ranks' run too.
  double peak = 0;
  ModuleFlops model{};

  /// Backward does each matrix product of forward twice: for the input's gradient and the weight's.
  double backward_factor() const { return 2 + recompute_factor; }
  /// Returns the FLOPs of forward and backward.
  double flops() const { return (1 + backward_factor()) * static_cast<double>(model.total.flops); }
  /// Returns the model FLOPs utilisation: the matrix products of forward and backward (recomputed
  /// ones do not count), over those that the processor could have done in the step's time. 0: not
  /// known.
  double mfu() const;
};

struct FlopsReportOptions {
  /// How deep the table goes; the model is at 0. -1: to the innermost modules.
  int64_t module_depth = -1;
  int64_t top_modules = 1;  ///< how many of the largest, for each depth
  bool detailed = true;     ///< the table of modules; else the largest ones alone
};

/// Modules of one depth that differ in numbers alone, as one: "h.*.attn".
struct ModuleKind {
  std::string name;
  int64_t modules = 0;
  FlopsCount total{};
};
/// Returns the kinds at each depth down to `depth` (-1: all), in the order of the model.
std::vector<std::vector<ModuleKind>> kinds_by_depth(const ModuleFlops& model, int64_t depth = -1);

/// Returns lines of text: totals, the largest modules of each depth, a table of modules.
std::string flops_report(const StepFlops& step, const FlopsReportOptions& options = {});
/// Returns the totals alone.
std::string flops_totals(const StepFlops& step);

}  // namespace zero
