// All ranks of a run do the same run.
#pragma once

#include "zero/comm/group.h"
#include "zero/data/dataset.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Throws ConfigError, which names what differs, where a rank was started with other options,
/// another configuration or other data than rank 0: a step's rate, a rank's share of the data and
/// the calls at the end of the run would differ, and nothing would tell. What may differ between
/// hosts is where data, model and run folder are, and how many threads compute. Collective.
void check_same_run(comm::Group& group, const RunSettings& run, const Dataset& data);

/// Throws ConfigError where some rank does not see what rank 0 writes to the run's folder: all
/// ranks write checkpoints there. The folder exists on rank 0. Collective.
void check_shared(comm::Group& group, const RunFolder& folder);

}  // namespace zero::train
