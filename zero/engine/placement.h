// The ranks that the states lie on.
//
// Note [Hybrid sharding]
// With mics_shard_size S the ranks are divided into shard groups of S consecutive ones (a block, in
// the pages for users). A shard group shards the states, and each of them holds the same: rank p of
// each is a replica of the others' rank p. So parameters are gathered in a shard group alone.
// Gradients add up in the shard group, unrounded, then over the replicas in the order of shard
// groups, and are rounded once (phased_reduction.h): if S is the number of a host's ranks, this is
// the order of additions of all ranks (Note [Order of additions] in comm/hosts_collectives.h). Work
// that all replicas would repeat (a sum, the norm) is divided: each of them does an equal part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/comm/group.h"
#include "zero/config/config.h"
#include "zero/engine/form.h"
#include "zero/partition/formulas.h"

namespace zero {

/// Each state is sharded over the ranks of `shards`, or whole on each of them, as `sharded` says;
/// the ranks of `replicas` hold the same. The two groups cross: a rank is in one of each. If there
/// is one shard group, `replicas` is a group of one.
struct Placement {
  partition::Sharding sharded;
  std::shared_ptr<comm::Group> all;
  std::shared_ptr<comm::Group> shards = all;
  std::shared_ptr<comm::Group> replicas = comm::single();
  /// If each of several hosts keeps all parameters on devices (Note [Kept on devices] in
  /// kept_units.cpp): the ranks of this host, and those at this one's place on all hosts. Else
  /// null.
  std::shared_ptr<comm::Group> host{};
  std::shared_ptr<comm::Group> same_place{};

  /// Returns the same as numbers, which is all that the plan and the costs need.
  PlannedRanks planned() const;
  /// Returns the number of ranks whose gradients add up.
  int ranks() const { return all->size(); }
  /// Takes a slice, which each replica holds too, and returns the part of it whose sum this rank
  /// computes.
  at::Tensor part_of(const at::Tensor& slice) const {
    const int64_t numel = slice.numel() / replicas->size();
    return slice.narrow(0, replicas->rank() * numel, numel);
  }
  /// Returns the rank of `all` whose part of an array is number `part` of ranks().
  int rank_of_part(int part) const {
    return part % replicas->size() * shards->size() + part / replicas->size();
  }
};

/// Makes the groups that `config` asks for. Throws ConfigError if mics_shard_size or
/// zero_hpz_partition_size does not suit the hosts. Collective.
Placement place(const Config& config, std::shared_ptr<comm::Group> all);

}  // namespace zero
