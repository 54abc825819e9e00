// The ranks of a job as numbers alone: costs need hosts and shard groups, but nothing that
// communicates.
#pragma once

#include <cstdint>

#include "zero/partition/link_bytes.h"

namespace zero::partition {

/// The ranks of a job: `hosts` hosts with `ranks_a_host` ranks each, in the order of the hosts.
/// Each `shards` consecutive ranks are a shard group, over which states are sharded; shard
/// groups are replicas of each other (Note [Hybrid sharding] in engine/placement.h). If all ranks
/// shard together there is one shard group. `shards` divides the number of ranks. It divides the
/// ranks of a host or is a multiple of them.
///
/// Every function is exact for any number of ranks and communicates with no other rank.
struct RankGrid {
  int64_t hosts = 1;
  int64_t ranks_a_host = 1;
  int64_t shards = hosts * ranks_a_host;

  int64_t ranks() const { return hosts * ranks_a_host; }
  int64_t replicas() const { return ranks() / shards; }

  /// Returns all ranks.
  Cluster all() const { return {hosts, ranks_a_host}; }
  /// Returns the ranks of one shard group.
  Cluster shard_group() const {
    return shards <= ranks_a_host ? Cluster{1, shards}
                                  : Cluster{shards / ranks_a_host, ranks_a_host};
  }
  /// Returns the ranks that hold the same slices, one in each shard group.
  Cluster same_slices() const {
    return shards <= ranks_a_host ? Cluster{hosts, ranks_a_host / shards} : Cluster{replicas(), 1};
  }

  /// The coordinates of a rank. Axes for tensor and context parallelism would be added here.
  struct Place {
    int64_t host = 0;
    int64_t local = 0;    ///< its number among the ranks of its host
    int64_t replica = 0;  ///< the shard group that it is in
    int64_t shard = 0;    ///< its number among the ranks of its shard group: the slice that it owns
    bool operator==(const Place&) const = default;
  };
  Place place(int64_t rank) const {
    return {rank / ranks_a_host, rank % ranks_a_host, rank / shards, rank % shards};
  }
  int64_t rank_at(int64_t replica, int64_t shard) const { return replica * shards + shard; }
};

}  // namespace zero::partition
