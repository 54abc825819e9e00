// The plan of a run of `zero train`, before it starts: what its step takes of this or of another
// machine, beside other configurations with steps of as many sequences.
//
//   const auto planned = zero::train::plan_run(settings, 2, 1, [](const zero::Config& config) {
//     return zero::plan::measured_here(2, config.nvme_folders());
//   });
//   std::cout << zero::plan::memory_text(planned.run, "this run");
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "zero/config/settings.h"
#include "zero/planner/planner.h"

namespace zero::train {

struct PlannedRun {
  std::string model;        ///< its name
  plan::Question question;  ///< about the run's step
  plan::Candidate run;      ///< the run's own configuration
  plan::Answer answer;      ///< the configurations of steps of as many sequences
  /// The states that a memory budget puts on disk, and what of the run the plan leaves out:
  /// sentences.
  std::vector<std::string> notes;
};

/// Plans a run on `ranks` ranks, evenly on `hosts` hosts, of the machines that `machines`
/// describes, which is called with the run's configuration once the rest is known to be right. The
/// traced model is the run's: with its adapter, frozen parameters, tiles, dropout and
/// recomputation. Opens the data, and writes nothing. Throws ConfigError and DataError as the run
/// would, and ConfigError for a run on a device that is none of the machines'. With `together` all
/// hosts call this at the same time, and measure their operators together (plan::measure_together).
PlannedRun plan_run(const Settings& settings, int ranks, int hosts,
                    const std::function<plan::Cluster(const Config&)>& machines,
                    const plan::OfHosts& together = {});

}  // namespace zero::train
