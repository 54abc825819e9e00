// The memory of one rank in a step, by category, from a trace of the model and numbers alone.
//
// Note [Predicted memory]
// States are those of engine/costs.h, to the byte. What moves within a step is played back from the
// trace: activations come and go, gradients go to buckets (stages 2 and 3), full buckets are
// reduced one after the other, and slices of sums stay until the update. The rules are the
// engine's: bucket_pool.h, sharded_gradients.cpp, device_sums.cpp.
//
// At stage 3 a rank that gathers by copying keeps as many units as its memory allows, so
// `gathered_units` are the fewest that a step needs: those that an operator uses together, and the
// next one on its way.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "zero/base/ledger.h"
#include "zero/config/config.h"
#include "zero/partition/rank_grid.h"
#include "zero/planner/trace.h"

namespace zero::plan {

struct RankMemory {
  /// The most bytes of each category in a step.
  std::array<int64_t, kCategories> peaks{};
  /// The most bytes of all categories at once: on the device, in the host's memory, on the disk. A
  /// model that is traced as on a CPU has them all on the first but what is offloaded.
  int64_t device = 0;
  int64_t host = 0;
  int64_t disk = 0;
  /// The moment of `device`: the operator, and its module.
  std::string peak_operator, peak_module;

  int64_t of(Category category) const { return peaks[static_cast<size_t>(category)]; }
};

/// Returns the memory of rank 0 of `grid` with `config`. `trace` is of one micro-batch, with the
/// dtype of `config`. Throws ConfigError as an engine would.
RankMemory predict_memory(const Trace& trace, const Config& config,
                          const partition::RankGrid& grid);

/// Returns the options of a trace for this configuration.
TraceOptions trace_options(const Config& config, bool host);

}  // namespace zero::plan
