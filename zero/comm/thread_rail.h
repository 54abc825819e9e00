// Rails between hosts that are threads of one process: for tests and experiments.
#pragma once

#include <memory>
#include <vector>

#include "zero/comm/rail.h"

namespace zero::comm {

/// The ends of one rail, by host. Bytes are copied by whoever comes second, sender or receiver. An
/// abort of one end aborts all.
std::vector<std::shared_ptr<Rail>> thread_rail(int hosts);

}  // namespace zero::comm
