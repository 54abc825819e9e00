// Over which ranks the states lie.
#pragma once

#include <memory>

#include "zero/comm/group.h"
#include "zero/partition/formulas.h"

namespace zero {

/// Each state is sharded over the ranks of `shards`, or whole on each of them, as `sharded` says;
/// the ranks of `replicas` hold the same. The two groups cross: a rank is in one of each. Where all
/// ranks shard with all, `replicas` is a group of one, as the engine wants it today.
struct Placement {
  partition::Placement sharded;
  std::shared_ptr<comm::Group> shards;
  std::shared_ptr<comm::Group> replicas = comm::single();

  /// The ranks whose gradients add up.
  int ranks() const { return shards->size() * replicas->size(); }
};

}  // namespace zero
