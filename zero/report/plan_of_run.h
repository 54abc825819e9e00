// The memory that the planner predicts for a run that has been, from its log.
#pragma once

#include <optional>
#include <string>

#include "zero/planner/memory.h"
#include "zero/report/run_log.h"

namespace zero::report {

struct PlannedMemory {
  std::optional<plan::RankMemory> memory;
  std::string note;  ///< a sentence about it, or why there is none; may be empty
};

/// Predicts the memory of rank 0 of the run's configuration by a trace of its model. It throws
/// nothing: a run whose changes of the model are not in the log (adapters, tiles), or that the
/// planner does not know, has a sentence in place of figures.
PlannedMemory planned_memory(const RunLog& log);

}  // namespace zero::report
