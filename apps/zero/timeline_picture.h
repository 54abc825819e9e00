// A picture of simulated steps: a band for each, in it a line for each resource.
#pragma once

#include <string>
#include <vector>

#include "zero/paging/simulation.h"

namespace zero::app::benchmarks {

struct TimelineBand {
  std::string title;
  paging::SimulatedStep step;
};

/// The bands above each other over one axis of time, as SVG.
std::string timeline_picture(const std::string& title, const std::string& caption,
                             const std::vector<TimelineBand>& bands);

}  // namespace zero::app::benchmarks
