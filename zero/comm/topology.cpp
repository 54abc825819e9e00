#include "zero/comm/topology.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace zero::comm {

Topology Topology::of(std::span<const int64_t> hosts, int rank) {
  std::vector<int64_t> names;  // the hosts', in order
  std::vector<int> ranks;      // each host's
  Topology topology;
  for (int r = 0; r < static_cast<int>(hosts.size()); ++r) {
    const auto name = hosts[static_cast<size_t>(r)];
    const auto host =
        static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    // A host's ranks follow one another if each rank is on the newest host.
    topology.regular = topology.regular && host + 1 >= names.size();
    if (host == names.size()) {
      names.push_back(name);
      ranks.push_back(0);
    }
    if (r == rank) {
      topology.host = static_cast<int>(host);
      topology.local_rank = ranks[host];
    }
    ++ranks[host];
  }
  topology.hosts = static_cast<int>(names.size());
  topology.local_size = ranks[static_cast<size_t>(topology.host)];
  topology.regular = topology.regular && std::all_of(ranks.begin(), ranks.end(), [&](int count) {
                       return count == topology.local_size;
                     });
  return topology;
}

}  // namespace zero::comm
