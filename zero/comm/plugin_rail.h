// Rails over a plugin, a library of its own that is loaded when it is asked for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// The end on `host` of the rail that joins `ranks`, one of each host, by the plugin
/// libzero_rail_NAME.so, which is looked for beside libzero and then where the system looks for
/// libraries: "openmpi" or "mpich". Collective over `ranks`: their numbers are those that they have
/// in MPI, whose launcher must have started them.
///
/// Aborting one rail ends all of this process that go over MPI: it cannot take back a message that
/// it has begun to receive, so nobody calls it any more. (Over adapters that write to memory by
/// themselves, as InfiniBand's, a piece whose transfer had begun may still arrive afterwards: end
/// the process.)
///
/// Throws CommError naming the file, and the package that brings what it lacks. MPI waits for a
/// rank that has died as long as it likes: `check` is called again and again meanwhile, and what it
/// throws ends the wait.
std::unique_ptr<Rail> plugin_rail(
    const std::string& name, const std::vector<int>& ranks, int host, PieceOptions options = {},
    const std::function<void()>& check = [] {});

}  // namespace zero::comm
