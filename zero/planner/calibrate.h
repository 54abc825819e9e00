// A cluster whose speeds are those that real steps had.
//
// Note [Calibration]
// A plan from figures alone says how long operators take by a part of the peak and a part of the
// memory's bandwidth (Note [Efficiency] in hardware.h). Real steps tell these parts: of each step
// the predicted messages, copies and disk are taken off, and what is left is compared with the
// predicted operators and updates of processors. The median of the steps' factors scales both
// parts, so the step in the middle is predicted as it was.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/planner/planner.h"

namespace zero::plan {

/// A step that ran.
struct MeasuredStep {
  Config config{};
  int64_t micro_batch = 1;
  int64_t recompute = 0;  ///< as in RecomputeSettings::every
  double seconds = 0;
};

/// Returns the cluster of `question` with `products` and `streams` (and where those would be above
/// 1, the peak and the bandwidth) as the steps tell them. Without a step that fits it is returned
/// as it is. The result describes the machine by figures (`measured` is false).
Cluster calibrated(const Question& question, const std::vector<MeasuredStep>& steps);

}  // namespace zero::plan
