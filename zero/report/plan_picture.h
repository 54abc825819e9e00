// Draws the answer of a plan as one SVG file.
#pragma once

#include <string>
#include <vector>

#include "zero/planner/planner.h"

namespace zero::report {

/// Returns a picture of the first `rows` candidates that fit: the memory of a rank by category,
/// beside that of its device, and the step by part. Below them stand the points of `scale`, if
/// there are any: tokens a second of a rank, of those at the first point.
std::string plan_picture(const std::string& title, const plan::Answer& answer,
                         const plan::Cluster& cluster, const std::vector<plan::ScalePoint>& scale,
                         size_t rows);

}  // namespace zero::report
