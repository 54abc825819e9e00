#include "zero/engine/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero {

namespace {

void check_shard_size(int64_t size, const comm::Group& all) {
  const int64_t local = all.local_size();
  const auto suits = [&](int64_t s) {
    return all.size() % s == 0 && (local % s == 0 || s % local == 0);
  };
  if (suits(size)) return;
  std::vector<int64_t> choices;
  for (int64_t s = 1; s <= all.size(); ++s)
    if (suits(s)) choices.push_back(s);
  throw ConfigError(fmt::format(
      "zero_optimization.mics_shard_size is {}, but this job has {} ranks, {} on each host: it "
      "must divide all ranks, and divide those of a host or be a multiple of them. Use one of {}.",
      size, all.size(), local, fmt::join(choices, ", ")));
}

// On one host the whole parameters lie in a window that its ranks share, as hpZ wants them.
void check_kept(int64_t size, const comm::Group& all) {
  if (size == 1 || (all.topology().hosts == 1 && size == all.size())) return;
  if (all.topology().hosts == 1) {
    throw ConfigError(fmt::format(
        "zero_optimization.zero_hpz_partition_size is {}, but this job has {} ranks, all on one "
        "host. Use {}, or leave it out.",
        size, all.size(), all.size()));
  }
  throw ConfigError(fmt::format(
      "zero_optimization.zero_hpz_partition_size is {}: parameters are not kept on a host from "
      "forward to backward where there are several hosts ({}, with {} ranks each). Use "
      "mics_shard_size {}, with which no parameter comes from another host, or stage 2, with which "
      "each comes once a step.",
      size, all.topology().hosts, all.local_size(), all.local_size()));
}

}  // namespace

Placement place(const Config& config, std::shared_ptr<comm::Group> all) {
  check_kept(config.hpz_partition_size, *all);
  Placement placement{.sharded = {}, .all = std::move(all)};
  const auto& group = *placement.all;
  if (config.mics_shard_size < 0) return placement;
  check_shard_size(config.mics_shard_size, group);
  const auto size = static_cast<int>(config.mics_shard_size);
  if (size == group.size()) return placement;
  std::vector<int> block;
  std::vector<int> same_place;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank / size == group.rank() / size) block.push_back(rank);
    if (rank % size == group.rank() % size) same_place.push_back(rank);
  }
  placement.shards = placement.all->subgroup(block);
  placement.replicas = placement.all->subgroup(same_place);
  return placement;
}

}  // namespace zero
