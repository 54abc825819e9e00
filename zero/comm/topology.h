// The placement of a group's ranks on hosts.
#pragma once

#include <cstdint>
#include <span>

namespace zero::comm {

/// Hosts x ranks a host, as one rank sees it.
struct Topology {
  int hosts = 1;
  int host = 0;        ///< this rank's; hosts are counted in the order of their first ranks
  int local_size = 1;  ///< ranks of this host
  int local_rank = 0;  ///< this rank's place among them
  /// True if every host has as many ranks, which follow one another: rank = host * local_size +
  /// local_rank.
  bool regular = true;

  /// `hosts` names each rank's host by any number that tells it from others.
  static Topology of(std::span<const int64_t> hosts, int rank);
  /// Returns the topology of `size` ranks on one host.
  static Topology of_one_host(int size, int rank) {
    return {.local_size = size, .local_rank = rank};
  }
};

}  // namespace zero::comm
