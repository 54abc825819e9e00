// Draws simulated steps: each step is a band, which has a line for each resource.
#pragma once

#include <string>
#include <vector>

#include "zero/paging/simulation.h"

namespace zero::app::benchmarks {

struct TimelineBand {
  std::string title;
  paging::SimulatedStep step;
};

/// Returns an SVG in which the bands stand above each other over one axis of time.
std::string timeline_picture(const std::string& title, const std::string& caption,
                             const std::vector<TimelineBand>& bands);

}  // namespace zero::app::benchmarks
