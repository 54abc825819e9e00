#include "zero/comm/open_rail.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"
#include "zero/comm/job.h"
#include "zero/comm/plugin_rail.h"
#include "zero/comm/rail_address.h"

namespace zero::comm {
namespace {

constexpr const char* kVariable = "ZERO_TRANSPORT";

std::string chosen() {
  auto value = environment_variable(kVariable).value_or("");
  if (value.empty()) return "gloo";
  const std::array<std::string, 4> known{"gloo", "openmpi", "mpich", "mpi"};
  if (std::find(known.begin(), known.end(), value) == known.end()) {
    throw ConfigError(fmt::format("{} is '{}'.{} It may be gloo, openmpi, mpich or mpi.", kVariable,
                                  value, did_you_mean(value, known)));
  }
  if (value != "mpi") return value;
  if (environment_variable("OMPI_COMM_WORLD_SIZE")) return "openmpi";
  if (environment_variable("PMI_SIZE")) return "mpich";
  throw ConfigError(
      fmt::format("{} is 'mpi', and no mpirun has started this process. Say which one it is to be: "
                  "openmpi or mpich.",
                  kVariable));
}

}  // namespace

std::unique_ptr<Rail> open_rail(c10::intrusive_ptr<c10d::Store> store, const RailEnd& end,
                                PieceOptions options) {
  const auto transport = chosen();
  if (transport != "gloo") {
    // A store that knows that a rank has died throws. MPI itself needs none.
    const auto check = [&] {
      if (store) (void)store->check({"rail"});
    };
    return plugin_rail(transport, end.ranks, end.host, options, check);
  }
  return gloo_rail(std::move(store), end.host, end.hosts, rail_address(end.address), options);
}

}  // namespace zero::comm
