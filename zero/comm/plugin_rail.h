// Rails over a plugin, a library of its own that is loaded when it is needed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// Returns the end on `host` of the rail that joins `ranks`, one of each host, by the plugin
/// libzero_rail_NAME.so, which is looked for beside libzero and then in the system's places for
/// libraries: "openmpi" or "mpich". Collective over `ranks`: these are their numbers in MPI, whose
/// launcher must have started them.
///
/// Aborting one rail ends all rails of this process that go over MPI: MPI cannot take back a
/// message that it has begun to receive, so nobody calls it any more. (Over adapters that write to
/// memory by themselves, such as InfiniBand's, a piece whose transfer had begun may still arrive
/// afterwards: end the process.)
///
/// Throws CommError naming the file, and the package that has the missing library. MPI waits
/// without end for a rank that has died, so `check` is called again and again meanwhile, and an
/// exception of `check` ends the wait.
std::unique_ptr<Rail> plugin_rail(
    const std::string& name, const std::vector<int>& ranks, int host, PieceOptions options = {},
    const std::function<void()>& check = [] {});

}  // namespace zero::comm
