// The least time that a step with states off the device can take on this machine. It is the longest
// of computing, of the copies each way, and of the host's updates. `zero bench step` prints it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "apps/zero/bench.h"
#include "zero/comm/group.h"
#include "zero/optim/optimizer.h"

namespace zero::app::benchmarks {

/// The speeds, in units a second, that the slowest rank has while all ranks use their resources.
struct OffloadSpeeds {
  double products = 0;  ///< FLOPs
  double down = 0;      ///< bytes from the device to the host
  double up = 0;        ///< bytes from the host to the device
  double update = 0;    ///< bytes that updates on the host pass over
  Json json() const;
};
/// Measures them, but not the products. Collective.
OffloadSpeeds measure_offload(comm::Group& ranks, const Optimizer& optimizer,
                              at::ScalarType parameters, double products);

/// The work that a step asks of these resources.
struct OffloadWork {
  double flops = 0;
  double down = 0;  ///< bytes
  double up = 0;
  double update = 0;
};

struct OffloadBound {
  struct Resource {
    std::string_view name;
    double amount = 0;  ///< FLOPs or bytes of a step
    double speed = 0;
    double seconds() const { return amount / speed; }
  };
  OffloadBound(const OffloadWork& work, const OffloadSpeeds& speeds);
  std::array<Resource, 4> resources;
  /// Returns the resource that takes the longest.
  const Resource& binds() const;
  Json json() const;
};

}  // namespace zero::app::benchmarks
