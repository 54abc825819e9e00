// The collectives of simulated devices as a backend of c10d, as NCCL's: each call runs on a stream
// of the backend's own, after what the caller's stream has by then; a Work's wait lets the caller's
// stream follow, and the host goes on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

#include "zero/comm/group.h"

namespace zero::simulated {

/// Runs `body` on `ranks` ranks that are threads, with the device of the same index each, and a
/// group whose collectives carry tensors of that device. Rethrows as comm::run_as_threads.
void run_on_devices(int ranks, const std::function<void(std::shared_ptr<comm::Group>)>& body);

/// Runs `body` in the same way on `hosts` x `ranks` ranks, as comm::run_as_hosts does. With
/// `through_host` the hosts' memory carries the tensors (comm::ThroughHost).
void run_on_devices_of_hosts(int hosts, int ranks, bool through_host,
                             const std::function<void(std::shared_ptr<comm::Group>)>& body);

}  // namespace zero::simulated
