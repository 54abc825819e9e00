#include "zero/comm/open_rail.h"

#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"
#include "zero/comm/job.h"
#include "zero/comm/plugin_rail.h"
#include "zero/comm/rail_address.h"

namespace zero::comm {
std::unique_ptr<Rail> open_rail(c10::intrusive_ptr<c10d::Store> store, const RailEnd& end,
                                PieceOptions options) {
  const auto transport = transport_from_environment();
  if (transport == "mpi") {
    throw ConfigError(
        "ZERO_TRANSPORT is 'mpi', and no mpirun has started this process. Say which one it is to "
        "be: openmpi or mpich.");
  }
  if (transport != "gloo") {
    // The store throws when it knows that a rank has died. MPI itself needs no store.
    const auto check = [&] {
      if (store) (void)store->check({"rail"});
    };
    return plugin_rail(transport, end.ranks, end.host, options, check);
  }
  return gloo_rail(std::move(store), end.host, end.hosts, rail_address(end.address), options);
}

}  // namespace zero::comm
