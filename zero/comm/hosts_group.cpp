#include "zero/comm/hosts_group.h"

#include <fmt/format.h>

#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"
#include "zero/comm/hosts_backend.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/shm_meeting.h"

namespace zero::comm {

std::shared_ptr<Group> hosts_group(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
                                   GroupOptions options) {
  const auto& topology = job.topology;
  if (!topology.regular || topology.hosts * topology.local_size != job.size) {
    throw CommError(fmt::format("Rank {} of {}: {} hosts must have as many ranks each, in order.",
                                job.rank, job.size, topology.hosts));
  }
  // A store may serve several groups, one after the other: each has its own generation of keys.
  const auto generation = store->add(fmt::format("zero/hosts/generation/{}", job.rank), 1);
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(fmt::format("zero/hosts/{}", generation),
                                                           std::move(store));
  HostsParts parts;
  parts.topology = topology;
  if (topology.local_size > 1) {
    c10d::PrefixStore of_host(fmt::format("host/{}", topology.host), keys);
    parts.local = meet(of_host, topology.local_rank, topology.local_size, options.timeout,
                       topology.host * topology.local_size);
  }
  parts.rail = gloo_rail(
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("rail/{}", topology.local_rank), keys),
      topology.host, topology.hosts, rail_address(job.store_address), {.timeout = options.timeout});
  const Accounts accounts;
  return std::make_shared<Group>(
      hosts_transport(std::move(parts), options.timeout, accounts).transport, options, accounts);
}

}  // namespace zero::comm
