// Rails between hosts that are threads of one process, for tests and experiments.
#pragma once

#include <memory>
#include <vector>

#include "zero/comm/rail.h"

namespace zero::comm {

/// Returns the ends of one rail, by host. The end that comes second, sender or receiver, copies the
/// bytes. An abort of one end aborts all.
std::vector<std::shared_ptr<Rail>> thread_rail(int hosts);

}  // namespace zero::comm
