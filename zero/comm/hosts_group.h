// The group of ranks on several hosts.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>

#include "zero/comm/group.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// This rank's place in a job over several hosts, and where their store is.
struct HostsJob {
  int rank = 0;
  int size = 1;
  Topology topology{};          ///< regular
  std::string address{};        ///< of this host, by which it reaches the store: "10.0.0.2"
  std::string store_address{};  ///< where the store listens
  uint16_t store_port = 0;
};

/// The group of ranks on several hosts that meet in `store`. Collective.
std::shared_ptr<Group> hosts_group(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
                                   GroupOptions options = {});

}  // namespace zero::comm
