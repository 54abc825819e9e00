// Checks that all ranks were started for the same run.
#pragma once

#include <string>

#include "zero/comm/group.h"
#include "zero/data/dataset.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"

namespace zero::train {

/// Says in words what tells tokens from others: of each source their number, a checksum of the
/// first and the last 4096, and whether there are marks.
std::string identity(const Split& split);

/// Throws DataError if the run that is resumed was trained on other data than `here`.
void check_resumed_data(const Progress& saved, const Split& here);

/// Throws ConfigError, which names the difference, if a rank was started with other options,
/// another configuration or other data than rank 0. Otherwise a step's rate, a rank's share of the
/// data and the calls at the end of the run would differ unnoticed. Hosts may differ in the places
/// of data, model and run folder, and in the number of threads that compute. Collective.
void check_same_run(comm::Group& group, const RunSettings& run, const Dataset& data);

/// Throws ConfigError if some rank does not see the files that rank 0 writes to the run's folder,
/// since all ranks write checkpoints there. The folder exists on rank 0. Collective.
void check_shared(comm::Group& group, const RunFolder& folder);

}  // namespace zero::train
