// The rail that the environment asks for.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// One end of one rail.
struct RailEnd {
  int host = 0;   ///< of this end
  int hosts = 1;  ///< that the rail joins
  /// The ranks of the job that it joins, one on each host (an MPI alone asks for them).
  std::vector<int> ranks{};
  std::string address{};  ///< of this host, by which it reaches the store (for Gloo)
};

/// By ZERO_TRANSPORT: "gloo" (or unset), "openmpi", "mpich", or "mpi" for the one whose launcher
/// has started this process. Collective over the ranks of all rails; those of one rail meet in
/// `store`, which is the rail's own. Throws ConfigError for a transport that there is not, else as
/// gloo_rail and plugin_rail.
std::unique_ptr<Rail> open_rail(c10::intrusive_ptr<c10d::Store> store, const RailEnd& end,
                                PieceOptions options = {});

}  // namespace zero::comm
