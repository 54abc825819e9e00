// The parts of a rank's group on several hosts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "zero/base/owner_process.h"
#include "zero/comm/accounts.h"
#include "zero/comm/arena.h"
#include "zero/comm/hosts_collectives.h"
#include "zero/comm/hosts_health.h"
#include "zero/comm/link_clock.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/rail.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// The parts of a rank's group on several hosts.
struct HostsParts {
  Topology topology;
  /// the group's ranks by their numbers in the job, for messages; empty if those are the same
  std::vector<int> numbers{};
  std::shared_ptr<Rail> rail;
  std::shared_ptr<LinkClock> link{};  ///< the rank's; null makes one
  /// The ranks of this host; without memory if it has one rank.
  Meeting local{};
  /// Tells all ranks that a rank is in trouble, and returns the job's first report of it, which may
  /// be another rank's. May be empty: then every host finds out by itself.
  std::function<PeerError(const PeerError& trouble)> report{};
  /// Something that `report` needs; it lives until both backends are gone. `report` does not hold
  /// it itself, since the watch's own thread may be the last to let go of `report`.
  std::shared_ptr<void> lasting{};
};

/// Holds the parts that both backends of a rank use, and leaves the group in order when it is
/// destroyed.
struct HostsPlace {
  std::shared_ptr<void> lasting;  // first, since all else may report to it
  Topology topology;
  std::vector<int> numbers;
  std::shared_ptr<Rail> rail;
  std::shared_ptr<LinkClock> link;
  Accounts accounts;
  std::shared_ptr<Peers> peers;  // this host's; null if it has one rank
  std::shared_ptr<Arena> arena;
  std::vector<std::unique_ptr<Collectives>> local;  // by channel
  std::shared_ptr<HostsHealth> health;
  OwnerProcess owner;

  HostsPlace(HostsParts parts, Accounts counted)
      : lasting(std::move(parts.lasting)),
        topology(parts.topology),
        numbers(std::move(parts.numbers)),
        rail(std::move(parts.rail)),
        link(parts.link ? std::move(parts.link) : std::make_shared<LinkClock>()),
        accounts(std::move(counted)) {
    std::shared_ptr<Health> local_health;
    if (parts.local.peers) {
      peers = std::move(parts.local.peers);
      local_health = std::make_shared<Health>(peers);
      arena = std::make_shared<Arena>(std::move(parts.local.mapping), peers->rank(), number());
      for (int channel = 0; channel < kLocalChannels; ++channel) {
        local.push_back(
            std::make_unique<Collectives>(std::make_shared<Peers>(peers->on_channel(channel)),
                                          arena, accounts.ledger, accounts.traffic));
      }
    }
    health = std::make_shared<HostsHealth>(number(), rail, local_health, std::move(parts.report));
  }
  HostsPlace(const HostsPlace&) = delete;
  HostsPlace& operator=(const HostsPlace&) = delete;
  ~HostsPlace() {
    if (!owner.here()) return;
    if (peers) peers->post_left();
  }

  int rank() const { return topology.host * topology.local_size + topology.local_rank; }
  // This rank's number in the job.
  int number() const { return numbers.empty() ? rank() : numbers[static_cast<size_t>(rank())]; }
  int size() const { return topology.hosts * topology.local_size; }
  Collectives* on_channel(int channel) const {
    return local.empty() ? nullptr : local[static_cast<size_t>(channel)].get();
  }
  // Makes an array through which data pass on their way.
  at::Tensor make_array(int64_t bytes) const {
    return arena ? shared_tensor(arena, bytes, at::kByte, accounts.ledger, Category::communication)
                 : private_tensor(bytes, at::kByte, accounts.ledger, Category::communication);
  }
  HostsCollectives::MakeArray maker() const {
    return [this](int64_t bytes) { return make_array(bytes); };
  }
};

}  // namespace zero::comm
