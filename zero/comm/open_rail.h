// Opens the rail that the environment asks for.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// One end of one rail.
struct RailEnd {
  int host = 0;   ///< this end's host
  int hosts = 1;  ///< the number of hosts that the rail joins
  /// The ranks that it joins, one on each host, by their numbers in the job. Only MPI needs them.
  std::vector<int> ranks{};
  std::string address{};  ///< this host's, by which it reaches the store (for Gloo)
};

/// Opens a rail over the transport in ZERO_TRANSPORT: "gloo" (or unset), "openmpi", "mpich", or
/// "mpi" for the one whose launcher has started this process. Collective over the ranks of all
/// rails; those of one rail meet in `store`, which is the rail's own. Throws ConfigError for an
/// unknown transport, otherwise as gloo_rail and plugin_rail do.
std::unique_ptr<Rail> open_rail(c10::intrusive_ptr<c10d::Store> store, const RailEnd& end,
                                PieceOptions options = {});

}  // namespace zero::comm
